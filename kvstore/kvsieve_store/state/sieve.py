"""Sieve: in which order the sealed blocks of a pool go."""

from __future__ import annotations

import numpy as np

from kvsieve_store.state.arrays import I32Array, SlotArray
from kvsieve_store.state.slots import SlotTable

_MAX_WINDOW = 65_536
_MIN_LENGTH = 1024


class Sieve:
    """SIEVE eviction (Zhang et al., NSDI '24, algorithm 1), for blocks that form chains.

    Blocks stand in the order in which they were sealed. A hand moves from old to new and starts over at the
    end: it clears the visited bit of each block that it passes, and evicts those that had none. Only a leaf
    (no children), not leased and not pinned, can go. Once it went, its parent is tried at once, so that a
    chain goes from its tail up; a chain that is going is continued by the next call: evict(a) then evict(b)
    takes the same blocks as evict(a + b).

    A parent is always older than its children (see Pool.seal), so that what goes at the hand never changes
    what the hand has yet to pass. This is why a whole window can be judged in one vectorised step.

    The order is an array of slot + 1, in which blocks that went leave zeros; it is compacted when full.

    window: fewest places that are judged in one step; matters for speed alone.
    """

    def __init__(self, table: SlotTable, window: int = 512) -> None:
        self._table = table
        self._window = window
        self._order: I32Array = np.zeros(_MIN_LENGTH, np.int32)
        self._end = 0
        self._hand = 0
        self._count = 0
        self._climb = 0  # slot + 1 of the parent to try first
        self._stuck = False  # a whole search found nothing, and nothing has changed since
        # Views for the scalar work of a climb: a memoryview item costs a third of a numpy item.
        self._parent = table.parent.data
        self._children = table.children.data
        self._leases = table.leases.data
        self._visited = table.visited.data
        self._pinned = table.pinned.data

    def __len__(self) -> int:
        return self._count

    def slots(self) -> SlotArray:
        """All blocks, oldest first."""
        order = self._order[: self._end]
        return order[order > 0].astype(np.intp) - 1

    def append(self, slots: SlotArray) -> None:
        """Adds newly sealed blocks as the newest, in the order given."""
        if self._end + len(slots) > len(self._order):
            self._compact(len(slots))
        end = self._end + len(slots)
        self._order[self._end : end] = slots + 1
        self._table.position[slots] = np.arange(self._end, end)
        self._end = end
        self._count += len(slots)
        self._stuck = False

    def remove(self, slots: SlotArray) -> None:
        """Takes blocks out that go for another reason than eviction."""
        if self._climb and (slots == self._climb - 1).any():
            self._climb = 0
        self._take_out(slots)
        self._stuck = False

    def retry(self) -> None:
        """Says that a block may have become evictable: a lease or a pin is gone."""
        self._stuck = False

    def evict(self, count: int) -> SlotArray:
        """Takes out up to `count` blocks, and off their parents' child counts; fewer when no more can go."""
        victims: list[int] = []
        if count > 0 and self._count and not self._stuck:
            self._climb = self._ascend(self._climb, count, victims)
            self._take_out(np.array(victims, np.intp))
            self._sweep(count, victims)
            if len(victims) < count:
                self._stuck = True
                self._hand = 0  # no bit is set any more: the oldest comes first again
        return np.array(victims, np.intp)

    def _sweep(self, count: int, victims: list[int]) -> None:
        """Moves the hand until there are `count` victims, or two rounds found none."""
        window = min(max(self._window, 2 * count), _MAX_WINDOW)
        fruitless = 0
        while len(victims) < count and fruitless < 2 * self._end:
            before = len(victims)
            passed = self._pass_window(window, count, victims)
            fruitless = 0 if len(victims) > before else fruitless + passed
            self._take_out(np.array(victims[before:], np.intp))
            window = min(2 * window, _MAX_WINDOW)

    def _pass_window(self, window: int, count: int, victims: list[int]) -> int:
        """Moves the hand by up to `window` places, or to the last victim needed; returns by how many."""
        table = self._table
        if self._hand >= self._end:
            self._hand = 0
        order = self._order[self._hand : min(self._hand + window, self._end)]
        places = np.flatnonzero(order)
        slots = order[places].astype(np.intp) - 1
        seen = table.visited[slots]
        busy = seen | table.pinned[slots] | (table.children[slots] > 0) | (table.leases[slots] > 0)
        table.visited[slots] = 0
        passed = len(order)
        leaves = np.flatnonzero(busy == 0)
        for leaf, slot in zip(leaves.tolist(), slots[leaves].tolist(), strict=True):
            self._climb = self._ascend(slot + 1, count, victims)
            if len(victims) == count:
                table.visited[slots[leaf + 1 :]] = seen[leaf + 1 :]  # the hand did not get there
                passed = int(places[leaf]) + 1
                break
        self._hand += passed
        return passed

    def _ascend(self, entry: int, count: int, victims: list[int]) -> int:
        """Takes a leaf (slot + 1), then its ancestors while they can go; returns what to try next, or 0."""
        parent, children = self._parent, self._children
        leases, visited, pinned = self._leases, self._visited, self._pinned
        while entry and len(victims) < count:
            slot = entry - 1
            if children[slot] or visited[slot] or leases[slot] or pinned[slot]:
                return 0
            victims.append(slot)
            entry = parent[slot]
            if entry:
                children[entry - 1] -= 1
        return entry

    def _take_out(self, slots: SlotArray) -> None:
        self._order[self._table.position[slots]] = 0
        self._count -= len(slots)
        if not self._count:
            self._end = self._hand = 0

    def _compact(self, space: int) -> None:
        """Drops the zeros and leaves room for `space` blocks and half as many again as there are."""
        hand = int(np.count_nonzero(self._order[: self._hand]))
        live = self._order[: self._end]
        live = live[live > 0]
        length = max(len(self._order), len(live) + len(live) // 2 + space)
        if length > len(self._order):
            self._order = np.zeros(length, np.int32)
        self._order[: len(live)] = live
        self._order[len(live) :] = 0
        self._table.position[live - 1] = np.arange(len(live))
        self._end, self._hand = len(live), hand
