"""How long to wait before the next try to reach the store."""

from __future__ import annotations

import random

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 5.0


class Backoff:
    """Doubles from FIRST_SECONDS to LONGEST_SECONDS; each wait is cut by up to a half at random, so that the
    engines of a host do not come back all at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = FIRST_SECONDS

    def reset(self) -> None:
        self._next = FIRST_SECONDS

    def wait(self) -> float:
        """Seconds to wait now."""
        seconds = self._next * self._rng.uniform(0.5, 1.0)
        self._next = min(self._next * 2, LONGEST_SECONDS)
        return seconds
