"""Announcements against a model: a directory that hears them late, twice, or not at all."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsieve_store.directory.announcements import Announcements, Change

LIMIT = 12
TTL = 10
POOL = bytes(32)
ME, OTHER = 7, 8


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


class Announcing(RuleBasedStateMachine):
    """held: what this store holds. known: what the directory says that it holds, and until when."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Announcements(LIMIT)
        self.now = 0
        self.held: set[bytes] = set()
        self.known: dict[bytes, int] = {}
        self.log: list[Change] = []
        self.dropped = 0
        self.incomplete = False

    def add(self, held: bool, store: int, keys: list[bytes]) -> None:
        fits = len(self.log) + len(keys) <= LIMIT
        assert self.queue.add(held, store, POOL, b"".join(keys)) == fits
        if fits:
            self.log += [Change(held, store, POOL, k) for k in keys]
        else:
            self.dropped += len(keys)
            self.incomplete = True

    @rule(numbers=st.lists(st.integers(0, 7), max_size=5, unique=True))
    def seal(self, numbers: list[int]) -> None:
        new = [key(n) for n in numbers if key(n) not in self.held]
        self.held.update(new)
        self.add(True, ME, new)

    @rule(numbers=st.lists(st.integers(0, 7), max_size=5, unique=True))
    def evict(self, numbers: list[int]) -> None:
        gone = [key(n) for n in numbers if key(n) in self.held]
        self.held.difference_update(gone)
        self.add(False, ME, gone)

    @rule(number=st.integers(0, 7))
    def another_has_not(self, number: int) -> None:
        self.add(False, OTHER, [key(number)])

    @rule(count=st.integers(1, 9), share=st.floats(0, 1), answered=st.booleans())
    def tell(self, count: int, share: float, answered: bool) -> None:
        """A batch, of which the directory may have heard only a part when the call fails."""
        batch = self.queue.first(count)
        assert batch == self.log[:count]
        heard = batch if answered else batch[: round(share * len(batch))]
        for held, store, _, k in heard:
            if store == ME:
                self.known.pop(k, None)
                if held:
                    self.known[k] = self.now + TTL
        if answered:
            self.queue.done(len(batch))
            del self.log[: len(batch)]

    @rule()
    def everything_anew(self) -> None:
        """What a round of all blocks does, once the queue is empty."""
        while self.log:
            self.tell(5, 1.0, True)
        for k in sorted(self.held):
            self.add(True, ME, [k])
            self.tell(1, 1.0, True)
        assert self.held <= self.known.keys()

    @rule(seconds=st.integers(1, 2 * TTL))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.known = {k: ends for k, ends in self.known.items() if ends > self.now}
        self.incomplete = True  # until the next round

    @rule()
    def start_over(self) -> None:
        self.queue.clear()
        self.log.clear()
        self.known.clear()
        self.incomplete = True
        self.everything_anew()
        assert self.known.keys() == self.held
        self.incomplete = False

    @invariant()
    def it_agrees(self) -> None:
        assert len(self.queue) == len(self.log) <= LIMIT
        assert self.queue.dropped == self.dropped
        if not self.log and not self.incomplete:
            assert self.known.keys() == self.held


Announcing.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnnouncing = Announcing.TestCase
