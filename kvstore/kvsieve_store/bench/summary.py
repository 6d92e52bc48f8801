"""The short benchmarks in a row, as `kvsieve bench` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsieve_store.bench import copying, matching, sealing
from kvsieve_store.bench.blocks import pool
from kvsieve_store.bench.report import Goal, Report, conditions
from kvsieve_store.bench.store import TemporaryStore
from kvsieve_store.client import AdminClient

_ANSWER_SECONDS = 3.0
_STORE_FLAGS = ("--pool-size", "512MiB")


def run(endpoint: str | None, console: Console) -> int:
    """Measures the store at `endpoint`, or one of its own, and prints a table; the exit code is 0.

    Raises UnavailableError when no store answers at `endpoint`.

    A store that is given lends its memory: about 100 MiB for the copies, and 4 KiB per block that is sealed,
    as many as it seals in a few seconds. All of it is given back at the end.
    """
    if endpoint:
        # Asked once and briefly: the benchmarks' own clients would go on trying.
        with AdminClient(endpoint, timeout=_ANSWER_SECONDS) as admin:
            admin.status()
    with nullcontext() if endpoint else TemporaryStore(*_STORE_FLAGS) as own:
        target = endpoint or own.endpoint if own else str(endpoint)
        try:
            goals = []
            for report in _short(target, console):
                goals += report.goals
        finally:
            _clear(target)
    where = conditions()
    console.print(f"{where['cpu']}, {where['cores']} cores, load {where['load_average']:g}")
    print_table(console, goals)
    return 0


def print_table(console: Console, goals: list[Goal]) -> None:
    """The table; without the blanks at the ends of lines where it goes to a pipe or file."""
    if console.is_terminal:
        console.print(table(goals))
        return
    with console.capture() as shown:
        console.print(table(goals))
    for line in shown.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def table(goals: list[Goal]) -> Table:
    """Goals as a table: what was measured, and what is to be reached."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("what")
    for title in ("measured", "goal"):
        shown.add_column(title, justify="right")
    shown.add_column("result")
    for goal in goals:
        sign, mark = (">=" if goal.at_least else "<"), ("[green]met" if goal.met else "[red]missed")
        shown.add_row(
            goal.what, f"{number(goal.value)} {goal.unit}", f"{sign} {number(goal.limit)} {goal.unit}", mark
        )
    return shown


def number(value: float) -> str:
    """Four digits, or all of a larger number's before the point: 0.9123, 12.35, 67,750."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(endpoint: str, console: Console) -> Iterator[Report]:
    with console.status("block copies against memcpy"):
        yield copying.measure(
            endpoint, working_set=96 << 20, repetitions=7, geometries=copying.GEOMETRIES[:2]
        )
    with console.status("match while four sessions save"):
        yield matching.measure(endpoint, matches=1000, loads=[matching.PACED])
    with console.status("reserve and seal"):
        yield sealing.measure(endpoint, seconds=2.0, loads=sealing.LOADS[:2])


def _clear(endpoint: str) -> None:
    """Drops every block of the benchmarks' pools; the pools go by themselves then."""
    prefix = pool("").name
    with AdminClient(endpoint) as admin:
        for row in admin.list_pools().pools:
            if row.name.startswith(prefix):
                admin.clear(row.name)
