"""Slots of the arena for requests: none starts that might find no slot for a block that must leave the GPU.

An engine holds free slots (credits) for all that its requests may still write. What it lacks for the
request whose turn it is, it asks the store for; what came too short, it gives back after a moment, so that
two engines that wait for each other's slots do not do so for ever.

First come, first served, while that leads anywhere: a request that gets no nearer to its slots lets the
others try, one after another, and then has its turn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvsieve_store.client import SlotRef

if TYPE_CHECKING:
    from kvsieve_store.client import StoreClient

logger = init_logger("vllm.kvsieve")

HOLD_SECONDS = (0.05, 0.15)
"""How long an engine keeps slots that are too few."""

PAUSE_SECONDS = (0.02, 0.2)
"""How long it then leaves them to others."""

SLACK = 32
"""Slots too many that are not worth a call."""

PATIENCE_SECONDS = 10.0
"""How long a request has its turn without more slots coming within reach."""

ROUND_SECONDS = 10.0
"""How long others may then go first, at most; IDLE_SECONDS: when none of them does."""

IDLE_SECONDS = 1.0

TRY_SECONDS = 1.0
"""How long each of them has its turn, unless the store has too few before."""


class SlotBudget:
    """Polled once a step; waits for nothing.

    waiting: the request whose turn it is; no other can start before it. "" when slots are there for all, or
    it is anyone's turn. gave_up: whether the last maintain() has stopped waiting for a moment, for the sake
    of other engines or other requests.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        """clock: seconds, monotonic."""
        self._clock, self._rng = clock, rng
        self.waiting = ""
        self.gave_up = False
        self._need = 0
        """Slots that the waiting request needs."""
        self._since = 0.0
        """When the turn began, or slots came nearer."""
        self._reach = 0
        """Most slots that were there for the waiting request in its turn."""
        self._passed: set[str] = set()
        """Had their turn in vain in this round; the first one is why there is a round."""
        self._round_began = 0.0
        self._last_try = 0.0
        self._complained: set[str] = set()
        self._scarce = False
        """The store had too few when it was asked last."""
        self._asked: Future[int] | None = None
        self._asked_for = ""
        self._wanted = 0
        self._drop_at: float | None = None
        self._ask_at = 0.0

    def is_turn(self, request_id: str) -> bool:
        """Whether the request may ask for anything. While slots are scarce, one at a time may."""
        if not self.waiting and request_id in self._passed:
            return False
        if self._scarce and not self.waiting:
            self._take_turn(request_id)
        return self.waiting in ("", request_id)

    def admits(self, client: StoreClient, request_id: str, owed: int, need: int) -> bool:
        """Whether a request that may write `need` blocks can start, beside those that may write `owed`."""
        if self.waiting not in ("", request_id) or (not self.waiting and request_id in self._passed):
            return False
        if client.credits >= owed + need:
            self._scarce, self._last_try = False, self._clock()
            return True
        if not self.waiting:
            self._take_turn(request_id)
        self._need = need
        return False

    def forget(self, request_id: str) -> None:
        """The request has started, or gone."""
        self._passed.discard(request_id)
        self._complained.discard(request_id)
        if self.waiting == request_id:
            self._end_turn()

    def maintain(self, client: StoreClient, owed: int, target: int) -> list[SlotRef]:
        """Asks for what is missing; returns slots to give back. target: what the client keeps granted."""
        now, refused = self._clock(), False
        self.gave_up = False
        if self._asked is not None and self._asked.done():
            failed = self._asked.cancelled() or self._asked.exception() is not None
            self._scarce = failed or self._asked.result() < self._wanted
            if self._scarce:
                self._drop_at = self._drop_at or now + self._rng.uniform(*HOLD_SECONDS)
                self._ask_at = now + self._rng.uniform(*PAUSE_SECONDS)
            if self.waiting and self._asked_for == self.waiting:
                refused = client.credits < owed + self._need
                if client.credits - owed > self._reach:
                    self._reach, self._since = client.credits - owed, now
            self._asked = None
        self._rotate(now, refused)
        wanted = owed + self._need
        missing = wanted - client.credits
        if missing <= 0:
            self._drop_at = None
            surplus = client.credits - max(wanted, target)
            return client.take_credits(surplus) if surplus >= SLACK and self._asked is None else []
        if self._asked is not None:
            return []
        if self._drop_at is not None and now >= self._drop_at:
            self._drop_at, self.gave_up = None, True
            self._ask_at = now + self._rng.uniform(*PAUSE_SECONDS)
            return client.take_credits(max(client.credits - owed, 0))
        if now >= self._ask_at:
            self._asked, self._wanted = client.reserve_async(missing), missing
            self._asked_for = self.waiting
        return []

    def session_over(self) -> None:
        self._asked, self._drop_at, self._ask_at, self._scarce = None, None, 0.0, False
        self._passed.clear()

    def _rotate(self, now: float, refused: bool) -> None:
        """Ends a turn that leads nowhere, and a round. refused: the store had too few for this turn."""
        if not self.waiting:
            if now >= min(self._round_began + ROUND_SECONDS, self._last_try + IDLE_SECONDS):
                self._passed.clear()
            return
        if self._passed:
            if not refused and now - self._since < TRY_SECONDS:
                return
        elif now - self._since < PATIENCE_SECONDS:
            return
        else:
            self._round_began = self._last_try = now
            self._complain(now)
        self._passed.add(self.waiting)
        self._end_turn()
        self.gave_up = True

    def _take_turn(self, request_id: str) -> None:
        self.waiting, self._need, self._reach = request_id, 0, 0
        self._since = self._last_try = self._clock()

    def _end_turn(self) -> None:
        self.waiting, self._need, self._drop_at = "", 0, None

    def _complain(self, now: float) -> None:
        if self._need and self.waiting not in self._complained:
            self._complained.add(self.waiting)
            logger.warning(
                "kvsieve: a request waits for %d free slots of the store's arena, and has got no nearer to "
                "them for %.0f s: it is full of blocks in use. Requests that fit go first now and then. Give "
                "the store more memory, or serve fewer requests at once",
                self._need,
                now - self._since,
            )
