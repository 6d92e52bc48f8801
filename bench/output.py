"""Where results go: JSON and a plot per benchmark, and a table on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import plots
from kvsieve_store.bench.report import Report
from kvsieve_store.bench.summary import table

OUT = Path(__file__).parent / "out"


def save(report: Report, out: Path = OUT) -> Path:
    """Writes NAME.json and NAME.png to `out`, prints the goals; returns the JSON's path."""
    record = report.record()
    path = write(record, out)
    plots.draw(record, path.with_suffix(".png"))
    console = Console(highlight=False)
    console.print(f"{report.name}: {path}")
    for row in report.rows:
        console.print({name: value for name, value in row.items() if not isinstance(value, list)})
    console.print(table(report.goals))
    return path


def write(record: dict[str, Any], out: Path = OUT) -> Path:
    """Writes a report's record to NAME.json in `out`; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{record['name']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
