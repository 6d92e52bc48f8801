"""From rows to time: how long swap-ins wait for rows, by a model of the link to host memory.

The model is fitted to a swap-in measured on one H200 (PCIe 5 x16, k 2,048, rows of 656 B): 3.8 us with
no miss, 11.0 us with 274, so misses cost 3.6 us of latency and then their bytes at 50 GB/s. It gives 36 us
for 8 requests with 274 misses each (37.5 measured), 265 us for 32 with 614 (277 measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.traces.simulate import Rows
from kvsieve_connector.sparse.prefetch import Policy


@dataclass(frozen=True)
class Link:
    """latency_us: of a swap-in or prefetch that fetches anything. compute_us: a layer's attention, in which
    prefetches for later layers run (60 us at a batch of 8). requests: decoding together, alike."""

    latency_us: float = 3.6
    gb_s: float = 50.0
    compute_us: float = 60.0
    requests: int = 8
    row_bytes: int = 656

    def fetch_us(self, rows_per_request: float) -> float:
        """Time of one transfer of so many rows of each request."""
        if not rows_per_request:
            return 0.0
        return self.latency_us + self.requests * rows_per_request * self.row_bytes / (self.gb_s * 1e3)


def exposed_us(
    misses: Rows, prefetched: Rows, policy: Policy, scale: float, link: Link
) -> npt.NDArray[np.float64]:
    """[steps, layers]: microseconds a layer's swap-in waits, for its prefetch and then for its misses.

    misses, prefetched: rows of a request, [steps, layers]. scale: what each of them stands for.
    Transfers queue on the link: a prefetch is issued when its list is known, after the misses of the layer
    that runs then, and whatever comes next waits for it. The swap-in's own 3.8 us are not a wait.
    """
    steps, layers = misses.shape
    issued_in: dict[int, list[int]] = {}
    for layer in range(layers):
        for prefetch in policy.steps[layer]:
            known = layer - 1 if prefetch.source == "previous-step" else prefetch.layer
            issued_in.setdefault(known % layers, []).append(layer)
    waits = np.zeros((steps, layers))
    now = free = 0.0
    done = np.zeros(layers)
    for step in range(steps):
        for layer in range(layers):
            began = now
            now = max(now, float(done[layer]))
            if misses[step, layer]:
                now = free = max(now, free) + link.fetch_us(scale * misses[step, layer])
            waits[step, layer] = now - began
            for target in issued_in.get(layer, ()):
                at = step if target > layer else step + 1
                rows = prefetched[at, target] if at < steps else 0
                if rows:
                    free = max(now, free) + link.fetch_us(scale * rows)
                done[target] = free if rows else now
            now += link.compute_us
    return waits
