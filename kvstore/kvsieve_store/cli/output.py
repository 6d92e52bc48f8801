"""How the commands print: tables for people, JSON for programs, errors as one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200
"""Columns of a table that goes to a pipe or file, where there is no window to fit."""


class Format(StrEnum):
    """What --format takes."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Table for people, JSON for programs.")]


class Column(NamedTuple):
    """title: head of the column. value: the cell's text, from a row. right: numbers line up on the right."""

    title: str
    value: Callable[[Any], str]
    right: bool = False


def stdout() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    stderr().print(Text(f"kvsieve: {message}", style="red"))


def print_rows(form: Format, rows: Sequence[Message], columns: Iterable[Column], none: str) -> None:
    """A listing; `none` is what the table says when there is nothing to list."""
    if form is Format.JSON:
        print_json([record(row) for row in rows])
        return
    if not rows:
        stdout().print(none)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = list(columns)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(column.value(row)) for column in columns))
    stdout().print(table)


def print_record(form: Format, row: Message, lines: Sequence[tuple[str, str]]) -> None:
    """One thing: `lines` of name and value, or all its fields as JSON."""
    if form is Format.JSON:
        print_json(record(row))
        return
    console = stdout()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.print(
            Text(f"{name:<{width}}  ", style="bold").append(value, style="not bold"), soft_wrap=True
        )


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def record(message: Message) -> dict[str, Any]:
    """All fields of a message under their names in the protocol; bytes as hex digits."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | bool | int | float) else [_plain(item) for item in value]


def size(count: int) -> str:
    """Bytes as people read them: 512 B, 1.5 GiB, 8 GiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f}".removesuffix(".0") + f" {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as people read them: 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
