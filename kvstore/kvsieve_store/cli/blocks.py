"""Commands that change which blocks the store keeps: evict, pin, unpin, clear."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvsieve_store.cli.endpoint import EndpointOption, admin
from kvsieve_store.cli.keys import KeyOption, PoolArgument, check_keys, find_keys
from kvsieve_store.cli.output import Format, FormatOption, print_error, print_record


def evict(
    context: typer.Context,
    pool: PoolArgument,
    key: KeyOption = None,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Or: this many of the coldest blocks.")
    ] = None,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Drop blocks of a pool. Leased and pinned blocks stay; a block with children takes them with it.

    Fails when a named block was not there, or had to stay.
    """
    if bool(key) == (count is not None):
        raise typer.BadParameter("give --key, or --count, and not both", param_hint="--key / --count")
    digits = check_keys(key)
    with admin(context, endpoint) as client:
        answer = client.evict(pool, keys=find_keys(client, pool, digits), count=count or 0)
    lines = [
        ("evicted", str(answer.evicted)),
        ("skipped", f"{answer.skipped} (leased or pinned)"),
        ("unknown", str(answer.unknown)),
    ]
    print_record(form, answer, lines)
    if key and (answer.unknown or answer.skipped):
        raise typer.Exit(1)


def pin(
    context: typer.Context,
    pool: PoolArgument,
    key: KeyOption = None,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Protect blocks, and those before them in their chain, from eviction until `unpin`.

    Fails when a block was not there.
    """
    if not key:
        raise typer.BadParameter("give at least one", param_hint="--key")
    digits = check_keys(key)
    with admin(context, endpoint) as client:
        answer = client.pin(pool, find_keys(client, pool, digits))
    print_record(form, answer, [("pinned", str(answer.pinned)), ("unknown", str(answer.unknown))])
    if answer.unknown:
        raise typer.Exit(1)


def unpin(
    context: typer.Context,
    pool: PoolArgument,
    key: KeyOption = None,
    every: Annotated[bool, typer.Option("--all", help="Or: every pin of the pool.")] = False,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Let pinned blocks be evicted again. Fails when a block was not there."""
    if bool(key) == every:
        raise typer.BadParameter("give --key, or --all, and not both", param_hint="--key / --all")
    digits = check_keys(key)
    with admin(context, endpoint) as client:
        answer = client.unpin(pool, find_keys(client, pool, digits))
    print_record(form, answer, [("unpinned", str(answer.unpinned)), ("unknown", str(answer.unknown))])
    if answer.unknown:
        raise typer.Exit(1)


def clear(
    context: typer.Context,
    pool: Annotated[
        str,
        typer.Argument(
            metavar="POOL",
            help="Name of the pool, or 8 or more hex digits of its id. Default: all pools.",
            show_default=False,
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Drop every block of a pool, or of all pools, that is not leased. Pins do not protect."""
    if not yes:
        what = f"all blocks of {pool}" if pool else "all blocks of all pools"
        if not sys.stdin.isatty():
            print_error(f"clear drops {what}; give --yes to say that you mean it")
            raise typer.Exit(2)
        typer.confirm(f"Drop {what}?", abort=True)
    with admin(context, endpoint) as client:
        answer = client.clear(pool)
    print_record(form, answer, [("dropped", str(answer.dropped)), ("skipped", f"{answer.skipped} (leased)")])
