"""What an engine did step by step, and the decode speed that follows from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

SETTLING_STEPS = 8
"""Steps after a prefill that are left out: the batch has changed, hot buffers fill."""


class Step(NamedTuple):
    """A step whose results are there. at: seconds, any clock. decoding: requests that got one token each.
    prefilled: tokens of prompts."""

    at: float
    decoding: int
    prefilled: int


@dataclass(frozen=True)
class DecodeSpeed:
    """Of the steps in which as many requests decoded as ever did, and none was prefilled.

    requests: how many those were. steps: how many steps. itl_ms: median time between tokens, itl_p95_ms: 95th
    percentile. tokens_s: of all requests together.
    """

    requests: int
    steps: int
    itl_ms: float
    itl_p95_ms: float
    tokens_s: float


@contextmanager
def noting_steps(llm: Any) -> Iterator[list[Step]]:
    """Notes the steps of an engine of this process as the scheduler takes in their results."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    stock, steps = scheduler.update_from_output, []

    def noting(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(scheduled, *args, **kwargs)
        if counts := list(scheduled.num_scheduled_tokens.values()):
            prefilled = sum(n for n in counts if n > 1)
            steps.append(Step(time.perf_counter(), counts.count(1), prefilled))
        return result

    scheduler.update_from_output = noting
    try:
        yield steps
    finally:
        del scheduler.update_from_output


def decode_speed(steps: Sequence[Step], settling: int = SETTLING_STEPS) -> DecodeSpeed:
    """Raises ValueError when no step counts."""
    intervals: dict[int, list[float]] = {}
    since = 0
    for before, step in pairwise(steps):
        same = not step.prefilled and not before.prefilled and step.decoding == before.decoding
        since = since + 1 if same else 0
        if since > settling:
            intervals.setdefault(step.decoding, []).append(step.at - before.at)
    if not intervals:
        raise ValueError(f"of {len(steps)} steps none is one of decoding alone; decode more tokens")
    requests = max(intervals)
    seconds = np.asarray(intervals[requests])
    return DecodeSpeed(
        requests=requests,
        steps=len(seconds),
        itl_ms=round(float(np.median(seconds)) * 1e3, 3),
        itl_p95_ms=round(float(np.percentile(seconds, 95)) * 1e3, 3),
        tokens_s=round(requests * len(seconds) / float(seconds.sum()), 1),
    )
