"""A trace run through hot buffers, one per layer, with a prefetch policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.traces.counts import Counts
from bench.traces.hot_buffer import Belady, HotBuffer
from bench.traces.trace import Positions, Trace
from kvsieve_connector.sparse.prefetch import Policy, Prefetch

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Rows per step and layer, [steps - 1, layers] each: the trace's first step only gives its top-k lists.

    warm: [layers] rows fetched by the warm start, before the first step; not in prefetched.
    used: rows prefetched that a swap-in then asked for. The others are those of Counts.
    """

    gpu: Rows
    hits: Rows
    misses: Rows
    prefetched: Rows
    used: Rows
    warm: Rows

    def counts(self, first_step: int = 0) -> Counts:
        """Sums over the layers and the steps from `first_step` on."""

        def total(rows: Rows) -> int:
            return int(rows[first_step:].sum())

        gpu, hits, misses = total(self.gpu), total(self.hits), total(self.misses)
        return Counts(
            asked_rows=gpu + hits + misses,
            gpu_rows=gpu,
            hot_rows_hit=hits,
            missed_rows=misses,
            prefetched_rows=total(self.prefetched),
            prefetched_rows_used=total(self.used),
        )


def simulate(
    trace: Trace,
    policy: Policy,
    hot_rows: int,
    *,
    replacement: type[HotBuffer] = HotBuffer,
    window_blocks: int = 2,
    budget: int | None = None,
) -> Run:
    """Runs the steps of `trace` with hot buffers of `hot_rows` that start empty.

    Whatever lies below the window is read from the arena, as if its GPU blocks had all been reused. A warm
    start fetches the list of the step before the first.
    budget: rows that one prefetch in a step fetches at most; None: as many as it may displace.
    Raises ValueError when hot_rows is less than k.
    """
    if hot_rows < trace.k:
        raise ValueError(f"hot_rows is {hot_rows}, must hold the {trace.k} rows of a step")
    shape = (trace.steps - 1, trace.layers)
    gpu, hits, misses, prefetched, used = (np.zeros(shape, np.int64) for _ in range(5))
    run = Run(gpu, hits, misses, prefetched, used, warm=np.zeros(trace.layers, np.int64))
    windows = np.array([trace.window(step, window_blocks) for step in range(trace.steps)])
    for layer in range(trace.layers):
        buffer = replacement(hot_rows, trace.tokens)
        next_use = _next_use(trace, layer, windows) if replacement is Belady else windows
        for step in range(1, trace.steps):
            lists = policy.steps[layer]
            if step == 1 and policy.warm_start:
                lists = (Prefetch("previous-step", layer), *lists)
            for prefetch in lists:
                rows = _listed(trace, prefetch, step, windows[step])
                warm_start = step == 1 and prefetch.source == "previous-step"
                fetched = buffer.prefetch(rows, None if warm_start else budget, warm_start=warm_start)
                if warm_start:
                    run.warm[layer] += fetched
                else:
                    prefetched[step - 1, layer] += fetched
            positions = trace.topk[step, layer].astype(np.int64)
            asked = positions[positions < windows[step]]
            if isinstance(buffer, Belady):
                buffer.next_use = next_use[step]
            missed, ahead = buffer.swap_in(asked)
            gpu[step - 1, layer] = trace.k - len(asked)
            hits[step - 1, layer] = len(asked) - missed
            misses[step - 1, layer] = missed
            used[step - 1, layer] = ahead
    return run


def _listed(trace: Trace, prefetch: Prefetch, step: int, window: int) -> Positions:
    """The rows that a prefetch names."""
    at = step - 1 if prefetch.source == "previous-step" else step
    positions = trace.topk[at, prefetch.layer].astype(np.int64)
    if prefetch.margin:
        around = np.arange(-prefetch.margin, prefetch.margin + 1)
        positions = np.unique(positions[:, None] + around)
    there = (positions >= 0) & (positions < window)
    return np.extract(there, positions)


def _next_use(trace: Trace, layer: int, windows: Rows) -> Rows:
    """[steps, tokens]: the step after this one in which a row is asked for below the window; steps: never."""
    found = np.full((trace.steps, trace.tokens), trace.steps, np.int64)
    for step in range(trace.steps - 2, -1, -1):
        found[step] = found[step + 1]
        positions = trace.topk[step + 1, layer]
        found[step, positions[positions < windows[step + 1]]] = step + 1
    return found
