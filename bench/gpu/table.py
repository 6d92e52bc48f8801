"""What the GPU benchmarks share in telling their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.output import write
from kvsieve_store.bench.report import Report
from kvsieve_store.bench.summary import table


def tell(report: Report, columns: Sequence[str] | None = None) -> None:
    """Prints rows and goals as tables, and writes the JSON. columns: those to show; all by default."""
    names = columns or list(dict.fromkeys(name for row in report.rows for name in row))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        shown.add_column(name, justify="left" if name in ("engine", "case", "error") else "right")
    for row in report.rows:
        shown.add_row(*(_text(row.get(name)) for name in names))
    console = Console(highlight=False, width=200)
    console.print(shown)
    if report.goals:
        console.print(table(report.goals))
    console.print(f"{report.name}: {write(report.record())}")


def device() -> dict[str, Any]:
    """The device and the software on it, for a report's parameters."""
    import torch
    import vllm

    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu_gib": round(found.total_memory / 2**30),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
