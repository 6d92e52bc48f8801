"""The kernels' counters, read from the device now and then without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EVERY_STEPS = 64
"""Steps between two readings."""


class CounterReader:
    """counters: int64 [layers, slots, n] on the device, ever growing. names: of the n, in order."""

    def __init__(self, counters: torch.Tensor, names: Sequence[str]) -> None:
        self._counters, self._names = counters, names
        self._steps = 0
        self._last = [0] * len(names)
        self._pinned = torch.zeros(len(names), dtype=torch.int64, pin_memory=counters.device.type == "cuda")
        self._event = torch.cuda.Event() if counters.device.type == "cuda" else None
        self._pending = False

    def poll(self) -> dict[str, float]:
        """What has been counted since the last reading, by names; mostly nothing.

        Called once a step.
        """
        found: dict[str, float] = {}
        if self._pending and (self._event is None or self._event.query()):
            self._pending = False
            now = self._pinned.tolist()
            found = {name: a - b for name, a, b in zip(self._names, now, self._last, strict=True) if a != b}
            self._last = now
        self._steps += 1
        if not self._pending and self._steps % EVERY_STEPS == 0:
            self._pinned.copy_(self._counters.sum((0, 1)), non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._pending = True
        return found


def row_stats(counted: dict[str, float], row_bytes: int) -> dict[str, float]:
    """What swap-ins have counted (kernels/tables.py), by the names of stats.py."""
    found = dict(counted)
    if waited := found.pop("swap_in_wait_ns", 0):
        found["swap_in_wait_seconds"] = waited / 1e9
    fetched = found.get("missed_rows", 0) - found.get("peer_rows", 0) + found.get("prefetched_rows", 0)
    if fetched:
        found["swapped_in_bytes"] = fetched * row_bytes
    return found


def piece_stats(counted: dict[str, float], piece_bytes: int) -> dict[str, float]:
    """What a dense model's picking has counted (kernels/block_tables.py), by the names of stats.py."""
    found = dict(counted)
    if pieces := found.get("arena_pieces", 0):
        found["arena_read_bytes"] = pieces * piece_bytes
    return found
