"""A layer's hot buffer as swap-in keeps it, in NumPy, with other ways to replace rows to compare with.

One request. A row is a position here; there are as many as the trace has tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from bench.traces.trace import Positions

Slots = npt.NDArray[np.int64]

_NEVER = 1 << 30


class HotBuffer:
    """Second-chance clock, the policy of the swap-in kernel.

    tag: [H] slot -> row, -1 none. slot_of: [rows] row -> slot, -1 none.
    stamp: [H] epoch of a slot's last use; 0: none, or the hand has passed since. A swap-in starts an epoch.
    """

    name: ClassVar[str] = "clock"

    def __init__(self, hot_rows: int, rows: int) -> None:
        self.tag = np.full(hot_rows, -1, np.int64)
        self.slot_of = np.full(rows, -1, np.int64)
        self.stamp = np.zeros(hot_rows, np.int64)
        self.epoch = 1
        self._hand = 0
        self._ahead = np.zeros(hot_rows, bool)  # prefetched, not yet asked for

    def swap_in(self, rows: Positions) -> tuple[int, int]:
        """Makes `rows`, no two alike, present; returns how many were missing, how many were prefetched.

        Raises ValueError if they are more than the hot buffer holds.
        """
        if len(rows) > len(self.tag):
            raise ValueError(f"{len(rows)} rows do not fit into a hot buffer of {len(self.tag)}")
        self.epoch += 1
        missing = self._touch(rows)
        slots = self.slot_of[rows]
        hits = slots[slots >= 0]
        used = int(self._ahead[hits].sum())
        self._ahead[hits] = False
        self._place(missing, ahead=False)
        return len(missing), used

    def prefetch(self, rows: Positions, budget: int | None = None, *, warm_start: bool = False) -> int:
        """Makes `rows` present, but displaces none that was used in this epoch; returns how many it fetched.

        With less room, or a budget, an even sample of the missing rows is fetched: a top-k list has no order.
        warm_start: what it fetches does not count as prefetched later.
        """
        missing = self._touch(rows)
        room = int((self.stamp != self.epoch).sum())
        count = min(len(missing), room, len(missing) if budget is None else budget)
        if count < len(missing):
            missing = missing[np.arange(count) * len(missing) // max(count, 1)]
        self._place(missing, ahead=not warm_start)
        return count

    def _touch(self, rows: Positions) -> Positions:
        """Stamps those of `rows` that are present; returns the others."""
        slots = self.slot_of[rows]
        self.stamp[slots[slots >= 0]] = self.epoch
        return rows[slots < 0]

    def _place(self, rows: Positions, *, ahead: bool) -> None:
        if not len(rows):
            return
        slots = self._victims(len(rows))
        displaced = self.tag[slots]
        self.slot_of[displaced[displaced >= 0]] = -1
        self.tag[slots] = rows
        self.slot_of[rows] = slots
        self.stamp[slots] = self.epoch
        self._ahead[slots] = ahead

    def _victims(self, count: int) -> Slots:
        """The next `count` slots under the hand that have had their second chance."""
        hot_rows = len(self.tag)
        order = (np.arange(hot_rows) + self._hand) % hot_rows
        stamp = self.stamp[order]
        spent = np.flatnonzero(stamp == 0)
        if len(spent) >= count:
            passed = spent[count - 1] + 1
            at = order[:passed]
            self.stamp[at[self._free(at)]] = 0
            self._hand = (self._hand + int(passed)) % hot_rows
            return order[spent[:count]]
        # A whole turn was not enough: it took every chance, and the second turn takes what comes first.
        again = np.flatnonzero((stamp != 0) & self._free(order))
        again = again[: count - len(spent)]
        self.stamp[order[(stamp != 0) & self._free(order)]] = 0
        self._hand = int(order[again[-1]] + 1) % hot_rows
        return np.concatenate([order[spent], order[again]])

    def _free(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of the slots may be taken: those not used in this epoch."""
        return np.not_equal(self.stamp[slots], self.epoch)


class CountingClock(HotBuffer):
    """A clock that takes rows first which were fetched and then not asked for again.

    A row has no chance when it is fetched; each later use gives it one more, up to `chances`; the hand takes
    one each time it passes.
    """

    name = "clock, 3 chances"
    chances: ClassVar[int] = 3

    def __init__(self, hot_rows: int, rows: int) -> None:
        super().__init__(hot_rows, rows)
        self._left = np.zeros(hot_rows, np.int64)

    def _touch(self, rows: Positions) -> Positions:
        slots = self.slot_of[rows]
        slots = slots[slots >= 0]
        self._left[slots] = np.minimum(self._left[slots] + 1, self.chances)
        return super()._touch(rows)

    def _victims(self, count: int) -> Slots:
        hot_rows = len(self.tag)
        order = (np.arange(hot_rows) + self._hand) % hot_rows
        order = order[self._free(order)]
        taken: list[Slots] = []
        while True:
            spent = np.flatnonzero(self._left[order] == 0)[:count]
            count -= len(spent)
            passed = len(order) if count else spent[-1] + 1
            at = order[:passed]
            self._left[at] = np.maximum(self._left[at] - 1, 0)
            taken.append(order[spent])
            if not count:
                self._hand = (int(at[-1]) + 1) % hot_rows
                return np.concatenate(taken)
            order = np.delete(order, spent)


class YoungClock(CountingClock):
    """The same with one chance: the clock but for what it does with new rows."""

    name = "clock, new rows without a chance"
    chances = 1


class Lru(HotBuffer):
    """The least recently used first."""

    name = "LRU"

    def _victims(self, count: int) -> Slots:
        free = np.flatnonzero(self._free(np.arange(len(self.tag))))
        return free[np.argsort(self.stamp[free], kind="stable")[:count]]


class Fifo(HotBuffer):
    """The longest present first, but none used in this epoch."""

    name = "FIFO"

    def __init__(self, hot_rows: int, rows: int) -> None:
        super().__init__(hot_rows, rows)
        self._queue = np.arange(hot_rows)

    def _victims(self, count: int) -> Slots:
        places = np.flatnonzero(self._free(self._queue))[:count]
        taken = self._queue[places]
        self._queue = np.concatenate([np.delete(self._queue, places), taken])
        return taken


class Belady(HotBuffer):
    """The one that is needed again last first: the fewest misses that any policy could have.

    next_use: [rows] step in which each row is asked for next, after this one; set by the caller.
    """

    name = "Belady"

    def __init__(self, hot_rows: int, rows: int) -> None:
        super().__init__(hot_rows, rows)
        self.next_use: npt.NDArray[np.int64] = np.zeros(rows, np.int64)

    def _victims(self, count: int) -> Slots:
        free = np.flatnonzero(self._free(np.arange(len(self.tag))))
        tags = self.tag[free]
        when = np.where(tags < 0, _NEVER, self.next_use[tags])
        return free[np.argsort(-when, kind="stable")[:count]]


REPLACEMENTS: tuple[type[HotBuffer], ...] = (HotBuffer, YoungClock, CountingClock, Lru, Fifo, Belady)
