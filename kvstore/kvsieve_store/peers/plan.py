"""PullPlan: what one pull still has to do. No I/O, no clock."""

from __future__ import annotations

from typing import Literal

Step = Literal["offer", "read", "follow", "done"]


class PullPlan:
    """Blocks come in the order of their keys, so one number says how far it is.

    total: keys asked for. present: of these, from the first on, that this store has. pulled: of these,
    brought by this pull. coming: behind what is offered, blocks that are still being written at the peer.
    damaged: blocks whose bytes were not taken. reason: why it is over before all are there; is_exhausted:
    because the peer has no more of them. A method that raises AssertionError was called out of turn.
    """

    def __init__(self, total: int, *, batch: int, attempts: int) -> None:
        """batch: most blocks of one read. attempts: failures in a row after which it is over."""
        self.total = total
        self.present = 0
        self.pulled = 0
        self.damaged = 0
        self.reason = ""
        self.is_exhausted = False
        self._batch = batch
        self._attempts = attempts
        self._left = attempts
        self._offered = 0  # keys up to this one can be read
        self.coming = 0
        self._bad_at = -1

    @property
    def step(self) -> Step:
        """What comes next."""
        if self.reason or self.present == self.total:
            return "done"
        if self.present < self._offered:
            return "read"
        return "follow" if self.coming else "offer"

    def found(self, count: int) -> None:
        """`count` more keys have come here by another way."""
        assert self.step == "offer" or not count
        assert self.present + count <= self.total
        self.present += count
        self._offered = max(self._offered, self.present)

    def offered(self, count: int, coming: int = 0, *, more_may_come: bool = False) -> None:
        """The peer has the next `count` keys, and `coming` more are being written. None ends the pull, unless
        it has them later."""
        assert self.step == "offer"
        assert count + coming <= self.total - self.present
        self._offered, self.coming = self.present + count, coming
        if not count + coming and not more_may_come:
            self.is_exhausted = True
            self.reason = "the other store has no more of them"

    def next_batch(self) -> int:
        """How many blocks to read now."""
        assert self.step == "read"
        return min(self._batch, self._offered - self.present)

    def came_no_more(self) -> None:
        """What was coming is to be asked for anew."""
        self.coming = 0

    def landed(self, asked: int, good: int) -> None:
        """Of `asked` blocks that were read, the first `good` are sound and sealed; the one after them is
        damaged. A block that is damaged twice ends the pull."""
        assert self.step in ("read", "follow")
        was_coming = self.step == "follow"
        if was_coming:
            assert asked <= self.coming
            self._offered, self.coming = self.present + asked, self.coming - asked
        assert 0 <= good <= asked <= self._offered - self.present
        self.present += good
        self.pulled += good
        if good:
            self._left = self._attempts
        if good < asked:
            self.damaged += 1
            if self._bad_at == self.present:
                self.reason = "a block came damaged twice"
            self._bad_at = self.present
            if was_coming:
                self._offered, self.coming = self.present, 0

    def broke(self, reason: str) -> None:
        """The peer was not reached, or the link to it broke: what it had offered has to be offered anew."""
        assert self.step != "done"
        self._offered, self.coming = self.present, 0
        self._left -= 1
        if not self._left:
            self.reason = reason

    def stop(self, reason: str) -> None:
        """It can't go on."""
        self.reason = self.reason or reason
