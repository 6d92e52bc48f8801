"""Sieve against a plain SIEVE with a list, and the rules for chains, leases and pins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.state.sieve import Sieve
from kvsieve_store.state.slots import SlotTable

SLOTS = 40


class TextbookSieve:
    """SIEVE as the paper has it, one block at a time, and chains that go from their tail up.

    `order` is oldest first; the hand is an index in it.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.visited: set[int] = set()
        self.held: set[int] = set()
        self.parent: dict[int, int] = {}
        self.hand = 0
        self.climb: int | None = None
        self.stuck = False  # a search found nothing: not repeated until something has changed

    def can_go(self, block: int) -> bool:
        return block not in self.held and block not in self.parent.values()

    def remove(self, block: int) -> None:
        at = self.order.index(block)
        self.order.remove(block)
        if at < self.hand:
            self.hand -= 1
        self.visited.discard(block)
        self.held.discard(block)
        self.climb = None if self.climb == block else self.climb
        self.parent.pop(block, None)

    def evict_one(self) -> int | None:
        if self.stuck:
            return None
        climb, self.climb = self.climb, None
        if climb is not None and climb not in self.visited and self.can_go(climb):
            return self.take(climb)
        for _ in range(2 * len(self.order) + 1):
            if self.hand >= len(self.order):
                self.hand = 0
            if not self.order:
                return None
            block = self.order[self.hand]
            self.hand += 1
            if block not in self.visited and self.can_go(block):
                return self.take(block)
            self.visited.discard(block)
        self.hand = 0
        self.stuck = True
        return None

    def take(self, block: int) -> int:
        parent = self.parent.get(block)
        self.remove(block)
        self.climb = parent
        return block


class Both:
    """The two, driven alike."""

    def __init__(self, window: int = 512) -> None:
        self.table = SlotTable(SLOTS)
        self.sieve = Sieve(self.table, window)
        self.plain = TextbookSieve()

    def free(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.plain.order]

    def append(self, slot: int, parent: int | None = None) -> None:
        self.sieve.append(np.array([slot]))
        self.plain.stuck = False
        self.plain.order.append(slot)
        if parent is not None:
            self.table.parent[slot] = parent + 1
            self.table.children[parent] += 1
            self.plain.parent[slot] = parent

    def visit(self, slot: int) -> None:
        self.table.visited[slot] = 1
        self.plain.visited.add(slot)

    def hold(self, slot: int) -> None:
        column = self.table.leases if slot % 2 else self.table.pinned
        column[slot] = 1
        self.plain.held.add(slot)

    def let_go(self, slot: int) -> None:
        self.table.leases[slot] = self.table.pinned[slot] = 0
        self.plain.held.discard(slot)
        self.sieve.retry()
        self.plain.stuck = False

    def evict(self, count: int) -> list[int]:
        gone = self.sieve.evict(count)
        self.table.free(gone)
        expected = []
        while len(expected) < count and (block := self.plain.evict_one()) is not None:
            expected.append(block)
        assert gone.tolist() == expected
        self.check()
        return expected

    def drop(self, slot: int) -> None:
        """Removes a leaf by another way."""
        if parent := int(self.table.parent[slot]):
            self.table.children[parent - 1] -= 1
        self.sieve.remove(np.array([slot]))
        self.table.free(np.array([slot]))
        self.table.leases[slot] = 0
        self.plain.remove(slot)
        self.plain.stuck = False

    def check(self) -> None:
        assert self.sieve.slots().tolist() == self.plain.order
        assert len(self.sieve) == len(self.plain.order)
        assert set(np.flatnonzero(self.table.visited).tolist()) == self.plain.visited


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_childless_blocks_go_as_in_the_textbook(data) -> None:
    drive(data, chains=False)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_chains_leases_and_pins(data) -> None:
    drive(data, chains=True)


def drive(data: st.DataObject, chains: bool) -> None:
    """Draws a history; Both.evict compares after each eviction."""
    both = Both(window=data.draw(st.sampled_from([1, 3, 512])))
    for _ in range(data.draw(st.integers(5, 60))):
        order = both.plain.order
        actions = ["append"] * 3 + (["visit", "visit", "evict"] if order else [])
        if chains and order:
            actions += ["child", "child", "child", "hold", "let_go", "drop"]
        action = data.draw(st.sampled_from(actions))
        if action in ("append", "child") and not both.free():
            action = "evict"
        if action == "append":
            both.append(both.free()[0])
        elif action == "child":
            both.append(both.free()[-1], parent=data.draw(st.sampled_from(order)))
        elif action == "visit":
            both.visit(data.draw(st.sampled_from(order)))
        elif action == "hold":
            both.hold(data.draw(st.sampled_from(order)))
        elif action == "let_go":
            both.let_go(data.draw(st.sampled_from(order)))
        elif action == "drop":
            leaves = [block for block in order if block not in both.plain.parent.values()]
            both.drop(data.draw(st.sampled_from(leaves)))
        else:
            both.evict(data.draw(st.integers(1, 6)))
    both.evict(SLOTS)


def test_long_history_is_compacted() -> None:
    """Far more insertions than the order array is long, with a hand in the middle and survivors."""
    both = Both()
    rng = np.random.default_rng(0)
    for round_ in range(3000):
        both.append(both.free()[0])
        if round_ % 7 == 0:
            both.visit(int(rng.choice(both.plain.order)))
        if not both.free():
            both.evict(int(rng.integers(1, 9)))


def test_a_chain_goes_from_its_tail_up() -> None:
    both = Both()
    for slot, parent in ((0, None), (1, 0), (2, 1), (3, None)):
        both.append(slot, parent)
    assert both.evict(3) == [2, 1, 0]


def test_a_chain_that_is_going_goes_on_in_the_next_call() -> None:
    both = Both()
    for slot, parent in ((0, None), (1, 0), (2, 1), (3, None)):
        both.append(slot, parent)
    assert both.evict(1) == [2]
    assert both.evict(2) == [1, 0]


def test_a_parent_that_was_matched_since_is_spared() -> None:
    both = Both()
    for slot, parent in ((0, None), (1, 0), (2, None)):
        both.append(slot, parent)
    assert both.evict(1) == [1]
    both.visit(0)
    assert both.evict(1) == [2]


def test_a_parent_with_another_child_stays() -> None:
    both = Both()
    for slot, parent in ((0, None), (1, 0), (2, 0)):
        both.append(slot, parent)
    assert both.evict(1) == [1]
    assert both.evict(2) == [2, 0]


def test_nothing_that_is_held_goes() -> None:
    both = Both()
    for slot in range(4):
        both.append(slot)
        both.hold(slot)
    assert both.evict(4) == []
    both.let_go(2)
    assert both.evict(4) == [2]
