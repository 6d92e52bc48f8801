"""The table at the end of the demo."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsieve_connector.demo.scenario import Result, Run


def show(console: Console, result: Result) -> None:
    """Before and after, side by side, and what they say."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("first engine", justify="right")
    table.add_column("second engine", justify="right")
    runs = (result.first, result.second)

    def row(name: str, *values: str) -> None:
        table.add_row(name, *(Text(value) for value in values))

    row("prompt, tokens", *(f"{run.answer.prompt_tokens:,}" for run in runs))
    row("from the store, tokens", *(f"{run.matched_tokens:,}" for run in runs))
    row("blocks matched", *(f"{run.matched_tokens // result.block_tokens}" for run in runs))
    row("bytes read back", *(_bytes(run) for run in runs))
    row("time to first token", *(f"{run.answer.ttft:.2f} s" for run in runs))
    console.print(table)
    for name, run in zip(("first ", "second"), runs, strict=True):
        console.print(Text(f"{name} answer: {run.answer.text}"), soft_wrap=True)
    ratio = result.second.answer.ttft / max(result.first.answer.ttft, 1e-9)
    console.print(Text(f"same answer: {'yes' if result.same_answer else 'NO'}"))
    console.print(Text(f"second engine used the store: {'yes' if result.used_store else 'NO'}"))
    console.print(
        Text(
            f"blocks of {result.block_tokens} tokens, {result.slot_bytes / 2**20:.1f} MiB each; "
            f"{result.sealed_blocks} were in the store when the first engine was killed"
        ),
        soft_wrap=True,
    )
    console.print(Text(f"time to first token: {ratio:.2f} of the first", style="bold"))


def _bytes(run: Run) -> str:
    return f"{run.loaded_bytes / 2**20:.1f} MiB" if run.loaded_bytes else "0"
