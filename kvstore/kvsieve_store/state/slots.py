"""SlotTable: what is known of every slot of a pool, as a structure of arrays; FreeSlots: the free ones."""

from __future__ import annotations

import numpy as np

from kvsieve_store.state.arrays import I32Array, SlotArray

UNOWNED, FREE, WRITING, SEALED = range(4)
"""States of a slot. UNOWNED: the pool does not own the slot's extent."""


class SlotTable:
    """One row per slot of the arena, in the pool's slot size.

    Rows of extents that the pool never owned are never touched: the arrays start as untouched zero pages,
    so 0 means "none" in all of them.

    key: [slots, 4] uint64, the block's key; valid while sealed.
    generation: uint32, goes up at each grant; never reset.
    state: uint8, one of UNOWNED, FREE, WRITING, SEALED.
    owner: uint16, ordinal of the session that holds the slot; 0 unless WRITING.
    parent: int32, slot + 1 of the block before in the chain; 0: first block, or the one before is gone.
    children: uint32, sealed blocks whose parent is this one.
    leases: uint32, leases on the block.
    visited: uint8, 1 if matched since the eviction hand last passed.
    pinned: uint8, 1 if an operator protects the block.
    position: int32, place in the eviction order; valid while sealed.
    """

    def __init__(self, slots: int) -> None:
        self.key = np.zeros((slots, 4), np.uint64)
        self.generation = np.zeros(slots, np.uint32)
        self.state = np.zeros(slots, np.uint8)
        self.owner = np.zeros(slots, np.uint16)
        self.parent = np.zeros(slots, np.int32)
        self.children = np.zeros(slots, np.uint32)
        self.leases = np.zeros(slots, np.uint32)
        self.visited = np.zeros(slots, np.uint8)
        self.pinned = np.zeros(slots, np.uint8)
        self.position = np.zeros(slots, np.int32)

    def __len__(self) -> int:
        return len(self.state)

    def free(self, slots: SlotArray) -> None:
        """Makes slots FREE and forgets what they held; key and position are left stale."""
        self.state[slots] = FREE
        self.owner[slots] = 0
        self.parent[slots] = 0
        self.children[slots] = 0
        self.visited[slots] = 0
        self.pinned[slots] = 0


class FreeSlots:
    """The free slots of a pool, last freed first granted."""

    def __init__(self, slots: int) -> None:
        self._stack: I32Array = np.zeros(slots, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, slots: SlotArray) -> None:
        """Adds slots; they come out in the order given."""
        end = self._count + len(slots)
        self._stack[self._count : end] = slots[::-1]
        self._count = end

    def pop(self, count: int) -> SlotArray:
        """Removes `count` slots, which must be there."""
        start = self._count - count
        slots = self._stack[start : self._count][::-1].astype(np.intp)
        self._count = start
        return slots

    def remove_range(self, start: int, stop: int, count: int) -> None:
        """Removes the `count` slots in [start, stop); looks up to twice as deep as they lie."""
        depth = min(2 * count, self._count)
        while True:
            bottom = self._count - depth
            top = self._stack[bottom : self._count]
            kept = top[(top < start) | (top >= stop)]
            if depth - len(kept) == count or depth == self._count:
                break
            depth = min(2 * depth, self._count)
        self._count = bottom + len(kept)
        self._stack[bottom : self._count] = kept

    def clear(self) -> None:
        """Removes every slot."""
        self._count = 0

    def view(self) -> I32Array:
        """The free slots, in no useful order; not a copy."""
        return self._stack[: self._count]
