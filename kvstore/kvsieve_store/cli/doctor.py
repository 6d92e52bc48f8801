"""The command `doctor`: runs the checks and says what to do."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from kvsieve_store.cli import checks
from kvsieve_store.cli.checks import Finding, Level
from kvsieve_store.cli.endpoint import EndpointOption, resolve
from kvsieve_store.cli.output import Format, FormatOption, print_json, stdout
from kvsieve_store.cli.serve import ConfigOption
from kvsieve_store.errors import SettingsError
from kvsieve_store.settings import load

_NOWHERE = "unix:///kvsieve.sock"
"""Stands for the addresses that the store listens at; no check looks at them."""

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    context: typer.Context,
    config: ConfigOption = None,
    pool_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the arena to check for.", show_default=False),
    ] = None,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Check this host: memory, limits, vLLM and its plugins, the store. Fails if a check fails.

    The store's settings come from where `serve` takes them.
    """
    try:
        store, status = checks.store(resolve(context, endpoint))
    except SettingsError as error:
        found, _, advice = str(error).removeprefix("endpoint: ").partition("; ")
        store, status = Finding("store", Level.FAIL, found, advice), None
    settings = load({"pool_size": pool_size}, config, os.environ, default_listen=_NOWHERE)
    findings = [
        store,
        checks.memory(settings, status),
        checks.arenas(settings.hugepages or settings.shm_dir),
        checks.memlock(status.arena_bytes if status else settings.pool_size),
        checks.hugepages(settings.hugepages),
        checks.numa(settings.numa_node),
        checks.vllm(),
        checks.plugin(os.environ),
        checks.sparse(os.environ),
        checks.hashes(os.environ),
    ]
    if form is Format.JSON:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print_finding(finding)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


def print_finding(finding: Finding) -> None:
    """The level, the check and what was found; the advice on a line of its own."""
    level = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
    stdout().print(level, Text(f"{finding.check:<10}{finding.found}"), soft_wrap=True)
    if finding.advice:
        stdout().print(Text(f"{'':<16}{finding.advice}", style="dim"), soft_wrap=True)
