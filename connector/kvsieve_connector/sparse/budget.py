"""Slots of the arena for requests: none starts that might find no slot for a block that must leave the GPU.

An engine holds free slots (credits) for all that its requests may still write. What it lacks for the
request whose turn it is, it asks the store for; what came too short, it gives back after a moment, so that
two engines that wait for each other's slots do not do so for ever.
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

COMPLAIN_SECONDS = 30.0


class SlotBudget:
    """Polled once a step; waits for nothing.

    waiting: the request whose turn it is; no other can start before it. "" when slots are there for all.
    gave_up: whether the last maintain() has stopped waiting for a moment, for the sake of other engines.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        """clock: seconds, monotonic."""
        self._clock, self._rng = clock, rng
        self.waiting = ""
        self.gave_up = False
        self._need = 0
        """Slots that the waiting request needs."""
        self._since = 0.0
        self._complained = False
        self._scarce = False
        """The store had too few when it was asked last."""
        self._asked: Future[int] | None = None
        self._wanted = 0
        self._drop_at: float | None = None
        self._ask_at = 0.0

    def is_turn(self, request_id: str) -> bool:
        """Whether the request may ask for anything. While slots are scarce, one at a time may."""
        if self._scarce and not self.waiting:
            self._take_turn(request_id)
        return self.waiting in ("", request_id)

    def admits(self, client: StoreClient, request_id: str, owed: int, need: int) -> bool:
        """Whether a request that may write `need` blocks can start, beside those that may write `owed`."""
        if self.waiting not in ("", request_id):
            return False
        if client.credits >= owed + need:
            self._scarce = False
            return True
        if not self.waiting:
            self._take_turn(request_id)
        self._need = need
        return False

    def forget(self, request_id: str) -> None:
        """The request has started, or gone."""
        if self.waiting == request_id:
            self.waiting, self._need, self._drop_at = "", 0, None

    def maintain(self, client: StoreClient, owed: int, target: int) -> list[SlotRef]:
        """Asks for what is missing; returns slots to give back. target: what the client keeps granted."""
        now, wanted = self._clock(), owed + self._need
        self.gave_up = False
        if self._asked is not None and self._asked.done():
            failed = self._asked.cancelled() or self._asked.exception() is not None
            self._scarce = failed or self._asked.result() < self._wanted
            if self._scarce:
                self._drop_at = self._drop_at or now + self._rng.uniform(*HOLD_SECONDS)
                self._ask_at = now + self._rng.uniform(*PAUSE_SECONDS)
            self._asked = None
        missing = wanted - client.credits
        if missing <= 0:
            self._drop_at = None
            surplus = client.credits - max(wanted, target)
            return client.take_credits(surplus) if surplus >= SLACK and self._asked is None else []
        self._complain(now)
        if self._asked is not None:
            return []
        if self._drop_at is not None and now >= self._drop_at:
            self._drop_at, self.gave_up = None, True
            self._ask_at = now + self._rng.uniform(*PAUSE_SECONDS)
            return client.take_credits(max(client.credits - owed, 0))
        if now >= self._ask_at:
            self._asked, self._wanted = client.reserve_async(missing), missing
        return []

    def session_over(self) -> None:
        self._asked, self._drop_at, self._ask_at, self._scarce = None, None, 0.0, False

    def _take_turn(self, request_id: str) -> None:
        self.waiting, self._need = request_id, 0
        self._since, self._complained = self._clock(), False

    def _complain(self, now: float) -> None:
        if self.waiting and not self._complained and now - self._since > COMPLAIN_SECONDS:
            self._complained = True
            logger.warning(
                "kvsieve: a request has waited %.0f s for %d free slots of the store's arena; it is full of "
                "blocks in use. Give the store more memory, or serve fewer requests at once",
                now - self._since,
                self._need,
            )
