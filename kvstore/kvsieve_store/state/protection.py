"""Protection: what of a pool must stay where it is, and so which extents can be taken from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsieve_store.state.arrays import BoolArray, I32Array, SlotArray
from kvsieve_store.state.slots import SEALED, WRITING, SlotTable

_WIDE = 256
"""Blocks from which on a step up all their chains is one of numpy: about where it costs less than a loop."""

_PART = 1 << 20
"""Slots that a search for an extent looks at in one step."""


class Protection:
    """Pinned blocks with their ancestors, and the extents in which nothing must stay.

    Chains are not walked at each question. A pin marks what it protects. Only an unpin, or a marked block
    that is dropped all the same (clear), makes the marks be set anew, at the next question; nothing else
    changes the parent of a marked block. And an extent is looked into only when the slot that kept it last
    time no longer does, so that a search without success is cheap to repeat.
    """

    def __init__(self, table: SlotTable, slots_per_extent: int) -> None:
        self._table = table
        self._per_extent = slots_per_extent
        self._marked: BoolArray = np.zeros(len(table), np.bool_)
        self._stale = False
        self._keeper = np.arange(0, len(table), slots_per_extent)  # per extent the slot that kept it last

    def pin(self, slots: SlotArray) -> None:
        """Pins blocks."""
        self._table.pinned[slots] = 1
        if not self._stale:
            mark_with_ancestors(self._table.parent, slots, self._marked)

    def unpin(self, slots: SlotArray) -> None:
        """Takes the pins of blocks away."""
        self._table.pinned[slots] = 0
        self._stale = True

    def drop(self, slots: SlotArray) -> None:
        """Says that blocks are about to go, whether they are protected or not."""
        self._stale = self._stale or bool(self._marked[slots].any())

    def marked(self) -> BoolArray:
        """[slots of the table] bool: pinned blocks and all before them in their chains; not a copy."""
        if self._stale:
            self._marked = np.zeros(len(self._table), np.bool_)
            mark_with_ancestors(self._table.parent, np.flatnonzero(self._table.pinned), self._marked)
            self._stale = False
        return self._marked

    def emptiest_removable(self, extents: Sequence[int]) -> int | None:
        """Of `extents` without a writing, leased or protected slot the one with the fewest blocks."""
        table, marked = self._table, self.marked()
        owned = np.array(extents, np.intp)
        keepers = self._keeper[owned]
        kept = (table.state[keepers] == WRITING) | (table.leases[keepers] > 0) | marked[keepers]
        maybe = owned[~kept]
        best, fewest = None, self._per_extent + 1
        step = max(1, _PART // self._per_extent)
        for start in range(0, len(maybe), step):
            sealed = self._count_blocks(maybe[start : start + step])
            least = int(sealed.argmin())
            if sealed[least] < fewest:
                best, fewest = int(maybe[start + least]), int(sealed[least])
            if not fewest:
                break
        return best

    def _count_blocks(self, extents: SlotArray) -> SlotArray:
        """Blocks of each extent; more than it has slots where one must stay, which is kept in mind."""
        table, shape = self._table, (-1, self._per_extent)
        state = table.state.reshape(shape)[extents]
        stays = (state == WRITING) | (table.leases.reshape(shape)[extents] > 0)
        stays |= self._marked.reshape(shape)[extents]
        kept = stays.any(axis=1)
        self._keeper[extents[kept]] = extents[kept] * self._per_extent + stays[kept].argmax(axis=1)
        sealed: SlotArray = np.count_nonzero(state == SEALED, axis=1)
        sealed[kept] = self._per_extent + 1
        return sealed


def mark_with_ancestors(parent: I32Array, slots: SlotArray, marked: BoolArray) -> None:
    """Marks blocks and all that lie before them in their chains; what lies before a mark is marked already.

    parent: [slots of the table] int32, slot + 1, 0 for none. marked: [slots of the table] bool, changed.
    """
    slots = slots[~marked[slots]]
    while len(slots) > _WIDE:
        marked[slots] = True
        above = np.unique(parent[slots]).astype(np.intp)
        above = above[above > 0] - 1
        slots = above[~marked[above]]
    # A long chain has one block a step: memoryview items cost a hundredth of numpy calls.
    up, done = parent.data, marked.data
    for slot in slots.tolist():
        while not done[slot]:
            done[slot] = True
            if not up[slot]:
                break
            slot = up[slot] - 1
