"""Handoffs: blocks that are held for another store from their seal on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvsieve_store.state.arrays import I32Array


class Handoffs:
    """Slots of sealed blocks that were announced with a hold, each once. Counting the hold as a lease on the
    block is the pool's part. What take_*() return is held no more."""

    def __init__(self) -> None:
        self._holds: dict[int, tuple[int, float]] = {}
        self._next = np.inf

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, slot: int, ordinal: int, ends: float) -> None:
        """A block that was just sealed. ordinal: of the session that has announced it. ends: seconds."""
        self._holds[slot] = (ordinal, ends)
        self._next = min(self._next, ends)

    def take(self, slots: Iterable[int]) -> I32Array:
        """Those of the slots that are held."""
        return self._take([slot for slot in dict.fromkeys(slots) if slot in self._holds])

    def take_of(self, ordinal: int) -> I32Array:
        """What a session has announced."""
        return self._take([slot for slot, (owner, _) in self._holds.items() if owner == ordinal])

    def take_expired(self, now: float) -> I32Array:
        """What has been held for as long as it was to be."""
        if now < self._next:
            return self._take([])
        over = self._take([slot for slot, (_, ends) in self._holds.items() if ends <= now])
        self._next = min((ends for _, ends in self._holds.values()), default=np.inf)
        return over

    def _take(self, slots: list[int]) -> I32Array:
        for slot in slots:
            del self._holds[slot]
        return np.array(slots, np.int32)
