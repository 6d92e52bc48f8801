"""Times on a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_us(call: Callable[[], object], repetitions: int) -> float:
    """Median microseconds on the device of what `call` puts on the current stream."""
    times = []
    for _ in range(repetitions):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        call()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) * 1e3)
    return statistics.median(times)
