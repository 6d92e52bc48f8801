"""The `kvsieve` command, and what its exit codes mean: 0 ok, 1 failed or not found, 2 wrong usage."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvsieve_store import __version__
from kvsieve_store.cli import blocks, doctor, listings, serve, stopping
from kvsieve_store.cli.endpoint import EndpointOption, resolve
from kvsieve_store.cli.output import print_error, stdout
from kvsieve_store.errors import InvalidRequestError, KVSieveError, NotFoundError, SettingsError
from kvsieve_store.settings import plain

COMMANDS = "kvsieve.commands"
"""Entry point group through which other packages add commands."""

OK, FAILED, USAGE = 0, 1, 2


def build() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="kvsieve",
        help="A host-memory store for the KV cache of vLLM engines.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        cls=_Group,
    )

    @app.callback()
    def common(
        context: typer.Context,
        endpoint: EndpointOption = None,
        show_version: Annotated[
            bool,
            typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None:
        context.obj = endpoint

    app.command("serve", cls=serve.PlainHelp)(serve.command())
    app.command()(listings.status)
    app.command()(listings.pools)
    app.command()(listings.sessions)
    app.command()(listings.blocks)
    app.command()(blocks.evict)
    app.command()(blocks.pin)
    app.command()(blocks.unpin)
    app.command()(blocks.clear)
    app.command()(stopping.drain)
    app.command()(doctor.doctor)
    app.command()(bench)
    app.command()(version)
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS), key=lambda entry: entry.name):
        app.command(entry.name)(_load(entry))
    return app


class _Group(TyperGroup):
    """Says in plain words what is wrong with an argument."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = plain(error.message)
            raise


def _print_version(given: bool) -> None:
    if given:
        version()
        raise typer.Exit


def _load(entry: importlib.metadata.EntryPoint) -> Callable[..., None]:
    """The command of another package. One that can't be imported must not take the rest with it."""
    try:
        loaded: Callable[..., None] = entry.load()
        return loaded
    except Exception as error:
        reason = f"{entry.name}: {entry.value} can't be loaded: {error}"

    def broken() -> None:
        raise KVSieveError(reason)

    broken.__doc__ = "Not usable in this installation."
    return broken


def bench(context: typer.Context, endpoint: EndpointOption = None) -> None:
    """Measure a store: block copies against memcpy, match, reserve and seal.

    Without --endpoint it starts one of its own for that.
    """
    try:
        run = importlib.import_module("kvsieve_store.bench").run
    except (ImportError, AttributeError) as error:
        raise KVSieveError(f"bench: not in this installation ({error})") from None
    given = endpoint or context.obj
    raise typer.Exit(run(resolve(context, given) if given else None, stdout()))


def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point of the console script."""
    try:
        build()()
    except (InvalidRequestError, SettingsError) as error:
        print_error(str(error))
        sys.exit(USAGE)
    except KVSieveError as error:
        message = str(error)
        if isinstance(error, NotFoundError) and message.startswith("pool: no pool"):
            message += "; `kvsieve pools` lists them"
        print_error(message)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
