"""BlockWaits against a list of who waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsieve_store.errors import CapacityError
from kvsieve_store.peers.waits import BlockWaits, Wait

MOST, MOST_PER_PEER = 6, 3

pools = st.sampled_from([b"p" * 32, b"q" * 32])
keys = st.integers(0, 4)
peers = st.sampled_from(["ipv4:1", "ipv4:2", "unix:"])


def key(n: int) -> bytes:
    return bytes([n + 1]) * 32


class Waiting(RuleBasedStateMachine):
    """waiting: of each wait its pool, key and peer; woken: how often each was woken."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = BlockWaits(MOST, MOST_PER_PEER)
        self.waiting: dict[int, tuple[bytes, int, str]] = {}
        self.handles: list[Wait] = []
        self.woken: Counter[int] = Counter()
        self.expected: Counter[int] = Counter()

    @rule(pool=pools, n=keys, peer=peers)
    def begin(self, pool: bytes, n: int, peer: str) -> None:
        number = len(self.handles)
        of_peer = sum(p == peer for _, _, p in self.waiting.values())
        if len(self.waiting) >= MOST or of_peer >= MOST_PER_PEER:
            with pytest.raises(CapacityError, match="wait_ms"):
                self.waits.begin(pool, key(n), peer, lambda: None)
            return
        self.handles.append(self.waits.begin(pool, key(n), peer, lambda: self.woken.update([number])))
        self.waiting[number] = (pool, n, peer)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.handles:
            number = data.draw(st.integers(0, len(self.handles) - 1))
            self.waits.end(self.handles[number])
            self.waiting.pop(number, None)

    @rule(pool=pools, some=st.lists(keys, max_size=4))
    def came(self, pool: bytes, some: list[int]) -> None:
        self.waits.came(pool, b"".join(map(key, some)))
        self._wake([n for n, (p, k, _) in self.waiting.items() if p == pool and k in some])

    @rule()
    def wake_all(self) -> None:
        self.waits.wake_all()
        self._wake(list(self.waiting))

    def _wake(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.waiting[number]
            self.expected[number] += 1

    @invariant()
    def it_agrees(self) -> None:
        assert self.woken == self.expected
        assert len(self.waits) == len(self.waiting)


Waiting.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestWaiting = Waiting.TestCase
