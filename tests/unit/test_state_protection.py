"""Protection: what pins keep, and how little is looked at to find an extent that can be taken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.state import StoreState, protection
from kvsieve_store.state.protection import Protection, mark_with_ancestors
from kvsieve_store.state.slots import FreeSlots
from tests.unit.state_driver import Engine, attach, key, keys, settings, spec


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each walk up the chains of a pool began with."""
    seen: list[int] = []

    def walk(parent, slots, marked) -> None:
        seen.append(len(slots))
        mark_with_ancestors(parent, slots, marked)

    monkeypatch.setattr(protection, "mark_with_ancestors", walk)
    return seen


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The extents that each search looked into."""
    seen: list[list[int]] = []
    count = Protection._count_blocks

    def counted(self, extents):
        seen.append(extents.tolist())
        return count(self, extents)

    monkeypatch.setattr(Protection, "_count_blocks", counted)
    return seen


@pytest.fixture
def state() -> StoreState:
    return StoreState(settings(extents=4))


@pytest.fixture
def rich(state: StoreState) -> Engine:
    """Has one chain over the whole arena, and the pin of its end."""
    engine = attach(state, spec("rich"), name="rich")
    engine.save_chain(*range(16))
    state.pin("rich", key(15))
    return engine


@given(st.data())
def test_marks_are_those_of_a_walk_block_by_block(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    parent = np.array([data.draw(st.integers(0, slot)) for slot in range(size)], np.int32)
    slots = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    expected = set()
    for slot in slots:
        while slot >= 0:
            expected.add(slot)
            slot = int(parent[slot]) - 1
    for wide in (0, 2, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protection, "_WIDE", wide)
            marked = np.zeros(size, np.bool_)
            mark_with_ancestors(parent, np.array(slots, np.intp), marked)
        assert set(np.flatnonzero(marked).tolist()) == expected


def test_a_pool_in_want_walks_no_chains_and_looks_into_no_extent_twice(
    state: StoreState, rich: Engine, walks: list[int], looked: list[list[int]]
) -> None:
    poor = attach(state, spec("poor"), name="poor")
    assert [len(poor.reserve(4)) for _ in range(5)] == [0] * 5
    assert walks == []  # the pin marked the chain
    assert sum(map(len, looked)) <= 4


def test_a_pin_that_goes_makes_room_at_once(state: StoreState, rich: Engine, walks: list[int]) -> None:
    poor = attach(state, spec("poor"), name="poor")
    state.pin("rich", keys(3, 7))
    assert len(poor.reserve(1)) == 0
    state.unpin("rich", key(15))
    assert len(poor.reserve(8)) == 8
    assert len(poor.reserve(1)) == 0
    assert walks == [2, 2]  # the pins, and once more for what they still keep
    assert {row.key for row in state.list_blocks("rich", 100, "").blocks} == {key(n) for n in range(8)}


def test_a_chain_that_clear_cut_keeps_only_what_is_left_of_it(state: StoreState, rich: Engine) -> None:
    poor = attach(state, spec("poor"), name="poor")
    lease = rich.match(15, lease_ms=1000).lease_id
    state.clear("rich")
    rich.release(lease)
    assert len(poor.reserve(16)) == 8  # its fair share: the pinned block is in an extent of its own
    assert state.list_pools()[0].pinned_blocks == 1


def test_a_lease_that_goes_makes_room_at_once(state: StoreState) -> None:
    rich = attach(state, spec("rich"), name="rich")
    rich.save(*range(16))
    lease = rich.match(*range(16), lease_ms=1000).lease_id
    poor = attach(state, spec("poor"), name="poor")
    assert len(poor.reserve(4)) == 0
    rich.release(lease)
    assert len(poor.reserve(4)) == 4


def test_a_pool_goes_with_all_its_extents_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = StoreState(settings(extents=8))
    engine = attach(state, spec("gone"), name="a")
    for _ in range(2):
        engine.release(grant=engine.reserve(20))
    engine.leave()
    monkeypatch.setattr(FreeSlots, "remove_range", lambda *_: pytest.fail("searched the free slots"))
    state.tick(0.0)
    assert (state.list_pools(), state.totals().owned_bytes) == ([], 0)
    after = attach(state, name="b").reserve(32)
    generations = dict(zip(after.slots.tolist(), after.generations.tolist(), strict=True))
    assert sorted(generations) == list(range(32))
    assert {slot for slot, generation in generations.items() if generation == 3} == set(range(20))


@given(st.permutations(range(24)), st.integers(0, 5), st.integers(0, 24))
def test_free_slots_lose_a_range_and_keep_their_order(order: list[int], extent: int, taken: int) -> None:
    free = FreeSlots(24)
    free.push(np.array(order, np.intp))
    free.pop(taken)
    here = range(4 * extent, 4 * extent + 4)
    free.remove_range(here.start, here.stop, sum(slot in here for slot in order[taken:]))
    assert free.pop(len(free)).tolist() == [slot for slot in order[taken:] if slot not in here]
