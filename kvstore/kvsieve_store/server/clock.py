"""The store's time: seconds in which it could hear its engines."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP = 2.0
"""Seconds; the most that one tick, which comes every second, may be after the one before."""


class Clock:
    """Monotonic seconds that stand still while the process does.

    A store that was stopped (SIGSTOP, a paused VM) has heard no heartbeat meanwhile, though its engines sent
    them: what lies beyond LONGEST_STEP after a tick does not count. The heartbeats come before the next tick.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lost = 0.0
        self._ticked = source()

    def now(self) -> float:
        return min(self._source() - self._lost, self._ticked + LONGEST_STEP)

    def tick(self) -> float:
        """Call once a second. Returns the seconds that the process stood still since the last call."""
        passed = self._source() - self._lost - self._ticked
        lost = max(passed - LONGEST_STEP, 0.0)
        self._lost += lost
        self._ticked += passed - lost
        return lost
