"""Time to first token of the same prompt, before and after an engine restart: the demo, several times."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_connector.demo import scenario
from kvsieve_connector.demo.document import QUESTION
from kvsieve_connector.demo.steps import Steps
from kvsieve_connector.demo.store import DemoStore
from kvsieve_store.bench.report import Goal, Report

_RATIO = 0.2


def measure(*, runs: int = 2, tokens: int = 6000) -> Report:
    """SmolLM2 on the CPU engine; each run has a store of its own, and two engines one after the other.

    tokens: length of the document that both engines read, about.
    """
    rows = [_run(tokens) for _ in range(runs)]
    ratio = statistics.median(row["ratio"] for row in rows)
    goals = [Goal("TTFT of the second engine, of the first's", ratio, _RATIO, "x", at_least=False)]
    return Report("restart", {"tokens": tokens}, rows, goals)


def _run(tokens: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="kvsieve-bench-"))
    store = DemoStore(folder)
    try:
        options = scenario.Options(None, None, QUESTION, tokens)
        result = scenario.play(options, folder, store, Steps(Console(highlight=False)))
    finally:
        store.child.close()
        shutil.rmtree(folder, ignore_errors=True)
    first, second = result.first, result.second
    return {
        "prompt_tokens": first.answer.prompt_tokens,
        "first_ttft_s": round(first.answer.ttft, 3),
        "second_ttft_s": round(second.answer.ttft, 3),
        "ratio": round(second.answer.ttft / first.answer.ttft, 4),
        "matched_tokens": second.matched_tokens,
        "loaded_bytes": second.loaded_bytes,
        "same_answer": result.same_answer,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.restart", __doc__, arguments)
    save(measure())


if __name__ == "__main__":
    main()
