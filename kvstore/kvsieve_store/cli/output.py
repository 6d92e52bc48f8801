"""How the commands print: tables for people, JSON for programs, errors as one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer
from google.protobuf.message import Message
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
"""Between the columns of a listing."""

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
    lines = "\n".join(map(printable, message.split("\n")))
    stderr().print(Text(f"kvsieve: {lines}", style="red"))


def printable(text: str) -> str:
    """Names come from clients: what would steer a terminal is shown as Python would write it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_rows(form: Format, rows: Sequence[Message], columns: Sequence[Column], none: str) -> None:
    """A listing; `none` is what is said when there is nothing to list."""
    if form is Format.JSON:
        print_json([record(row) for row in rows])
        return
    if not rows:
        stdout().print(none)
        return
    console = stdout()
    for line in layout(rows, columns, console.width if sys.stdout.isatty() else None):
        console.print(line, soft_wrap=True)


def layout(rows: Sequence[Any], columns: Sequence[Column], width: int | None) -> list[Text]:
    """Lines of a table or, where that is wider than `width`, of one block a row. No cell is ever broken.

    width: columns of the terminal; None when there is none, as in a pipe.
    """
    cells = [[printable(column.value(row)) for column in columns] for row in rows]
    widths = [
        max(cell_len(text) for text in (column.title, *texts))
        for column, texts in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    if width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        return _blocks(cells, [column.title.lower() for column in columns])
    titles = Text(_line([column.title for column in columns], columns, widths), style="bold")
    return [titles, *(Text(_line(row, columns, widths)) for row in cells)]


def _line(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for text, column, width in zip(texts, columns, widths, strict=True):
        blanks = " " * (width - cell_len(text))
        padded.append(blanks + text if column.right else text + blanks)
    return _GAP.join(padded).rstrip()


def _blocks(cells: Sequence[Sequence[str]], titles: Sequence[str]) -> list[Text]:
    lines = []
    for number, row in enumerate(cells):
        lines += [Text()] if number else []
        for title, text in zip(titles, row, strict=True):
            lines.append(Text(f"{title}: ", style="bold").append(text, style="not bold"))
    return lines


def print_record(form: Format, row: Message, lines: Sequence[tuple[str, str]]) -> None:
    """One thing: `lines` of name and value, or all its fields as JSON."""
    if form is Format.JSON:
        print_json(record(row))
        return
    console = stdout()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.print(
            Text(f"{name:<{width}}  ", style="bold").append(printable(value), style="not bold"),
            soft_wrap=True,
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


def duration(seconds: float) -> str:
    """Seconds as people read them: 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
