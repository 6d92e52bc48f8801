"""The swap-in's counters, read from the device now and then without waiting for it."""

from __future__ import annotations

import torch

NAMES = (
    "asked_rows",
    "gpu_rows",
    "hot_rows_hit",
    "missed_rows",
    "prefetched_rows",
    "prefetched_rows_used",
    "lost_rows",
    "swap_in_wait_ns",
)
EVERY_STEPS = 64
"""Steps between two readings."""


class CounterReader:
    """counters: int64 [layers, slots, 8] on the device, ever growing; NAMES says which is which."""

    def __init__(self, counters: torch.Tensor, row_bytes: int) -> None:
        self._counters, self._row_bytes = counters, row_bytes
        self._steps = 0
        self._last = [0] * len(NAMES)
        self._pinned = torch.zeros(len(NAMES), dtype=torch.int64, pin_memory=counters.device.type == "cuda")
        self._event = torch.cuda.Event() if counters.device.type == "cuda" else None
        self._pending = False

    def poll(self) -> dict[str, float]:
        """What has been counted since the last reading; mostly nothing. Called once a step."""
        found: dict[str, float] = {}
        if self._pending and (self._event is None or self._event.query()):
            self._pending = False
            now = self._pinned.tolist()
            found = {name: a - b for name, a, b in zip(NAMES, now, self._last, strict=True) if a != b}
            self._last = now
            fetched = found.get("missed_rows", 0) + found.get("prefetched_rows", 0)
            if fetched:
                found["swapped_in_bytes"] = fetched * self._row_bytes
        self._steps += 1
        if not self._pending and self._steps % EVERY_STEPS == 0:
            self._pinned.copy_(self._counters.sum((0, 1)), non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._pending = True
        return found
