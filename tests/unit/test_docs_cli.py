"""docs/cli.md has a section for every command."""

from __future__ import annotations

import re

import typer

from kvsieve_store.cli.main import build
from tests.conftest import ROOT


def test_every_command_has_a_section_and_there_is_no_other() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    named = {name for section in sections for name in section.split(", ")}
    command = typer.main.get_command(build())
    assert named == set(getattr(command, "commands"))  # noqa: B009 - a group's, which typer types as a command
