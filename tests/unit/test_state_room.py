"""StoreState: how a pool gets room: extents, quotas, eviction, other pools' extents, watermarks."""

from __future__ import annotations

import pytest

from kvsieve_store.state import StoreState
from tests.unit.state_driver import EXTENT_BYTES, attach, has, key, keys, settings, spec


def owned(state: StoreState) -> dict[str, int]:
    """Extents by pool name."""
    return {pool.name: pool.owned_bytes // EXTENT_BYTES for pool in state.list_pools()}


def left(state: StoreState, *numbers: int | str, pool: str = "pool") -> list[int | str]:
    """Which of the blocks are still there."""
    return [number for number in numbers if has(state, number, pool)]


def test_extents_are_taken_on_demand() -> None:
    state = StoreState(settings(extents=3))
    engine = attach(state)
    assert owned(state) == {"pool": 0}
    engine.reserve(4)
    assert owned(state) == {"pool": 1}
    engine.reserve(1)
    assert owned(state) == {"pool": 2}
    assert state.totals().owned_bytes == 2 * EXTENT_BYTES


def test_slot_numbers_tell_the_extent() -> None:
    state = StoreState(settings(extents=3))
    attach(state, spec("a"), name="a").reserve(1)
    large = attach(state, spec("b", slot_pages=2), name="b").reserve(2)
    assert [slot // 2 for slot in large.slots.tolist()] == [1, 1]


def test_the_quota_holds_and_the_pool_evicts_within_it() -> None:
    state = StoreState(settings(extents=4, pool_quota_bytes=2 * EXTENT_BYTES, quotas={"small": EXTENT_BYTES}))
    large, small = attach(state, name="a"), attach(state, spec("small"), name="b")
    for number in range(9):
        large.save(number)
    for number in range(5):
        small.save(number)
    assert owned(state) == {"pool": 2, "small": 1}
    assert left(state, *range(9)) == list(range(1, 9))
    assert left(state, *range(5), pool="small") == [1, 2, 3, 4]
    assert [pool.quota_bytes for pool in state.list_pools()] == [2 * EXTENT_BYTES, EXTENT_BYTES]


def test_growth_comes_before_eviction() -> None:
    state = StoreState(settings(extents=2))
    attach(state).save(*range(8))
    assert left(state, *range(8)) == list(range(8))


def test_what_was_matched_outlives_what_was_not() -> None:
    state = StoreState(settings(extents=1))
    engine = attach(state)
    engine.save(1, 2, 3, 4)
    engine.match(1)
    engine.save(5, 6)
    assert left(state, 1, 2, 3, 4, 5, 6) == [1, 4, 5, 6]
    assert state.counters()["pool"].evicted_blocks == 2


def test_leased_and_pinned_blocks_are_not_evicted() -> None:
    state = StoreState(settings(extents=1))
    engine = attach(state)
    engine.save(1, 2, 3, 4)
    lease = engine.match(1, lease_ms=1000).lease_id
    state.pin("pool", key(2))
    assert len(engine.reserve(4)) == 2
    assert left(state, 1, 2, 3, 4) == [1, 2]
    engine.release(lease)
    assert len(engine.reserve(4)) == 1
    state.unpin("pool", b"")
    assert len(engine.reserve(4)) == 1


def test_an_expired_lease_lets_blocks_go() -> None:
    state = StoreState(settings(extents=1))
    engine = attach(state)
    engine.save(1, 2, 3, 4)
    engine.match(1, 2, 3, 4, lease_ms=1000)
    assert len(engine.reserve(1)) == 0
    state.tick(1.0)
    assert len(engine.reserve(1)) == 1


def test_chains_shrink_from_their_tail() -> None:
    state = StoreState(settings(extents=1))
    engine = attach(state)
    engine.save_chain(1, 2, 3, 4)
    for remaining in ([1, 2, 3], [1, 2], [1], []):
        engine.reserve(1)
        assert left(state, 1, 2, 3, 4) == remaining


def test_a_leased_tail_protects_its_chain() -> None:
    state = StoreState(settings(extents=1))
    engine = attach(state)
    engine.save_chain(1, 2, 3)
    state.pin("pool", key(3))
    assert len(engine.reserve(4)) == 1
    assert left(state, 1, 2, 3) == [1, 2, 3]


def test_an_unused_pool_gives_way_the_longest_unused_first() -> None:
    state = StoreState(settings(extents=2))
    old, new = attach(state, spec("old"), name="old"), attach(state, spec("new"), name="new", now=1.0)
    old.save(1)
    new.save(1)
    new.leave()
    old.now = 5.0
    old.match(1)
    old.leave()
    assert len(attach(state, name="b").reserve(4)) == 4
    assert owned(state) == {"old": 1, "new": 0, "pool": 1}
    assert state.counters()["new"].evicted_blocks == 1


def test_a_pool_above_its_fair_share_gives_way_to_one_with_nothing() -> None:
    state = StoreState(settings(extents=4))
    rich, poor = attach(state, spec("rich"), name="a"), attach(state, spec("poor"), name="b")
    rich.save(*range(16))
    assert len(poor.reserve(4)) == 4
    assert len(poor.reserve(4)) == 4
    assert owned(state) == {"rich": 2, "poor": 2}
    assert len(poor.reserve(1)) == 0  # both have their share


def test_a_pool_evicts_its_own_before_it_takes_anything() -> None:
    state = StoreState(settings(extents=4))
    rich, poor = attach(state, spec("rich"), name="a"), attach(state, spec("poor"), name="b")
    poor.save(1)
    rich.save(*range(12))
    for number in range(2, 10):
        poor.save(number)
    assert owned(state) == {"rich": 3, "poor": 1}


@pytest.mark.parametrize("why", ["writing", "leased", "pinned", "before a pinned block"])
def test_an_extent_in_use_is_not_taken(why: str) -> None:
    state = StoreState(settings(extents=2))
    rich = attach(state, spec("rich"), name="a")
    grant = rich.reserve(8)
    rich.seal(grant, keys(*range(8)), bytes(32) * 4 + keys(3, 4, 5, 6))
    state.evict("rich", keys(*range(4 if why == "before a pinned block" else 8)[:3]), 0, 0)
    if why == "before a pinned block":
        state.pin("rich", key(7))
    elif why == "pinned":
        state.pin("rich", key(3) + key(7))
    elif why == "leased":
        rich.match(3, 4, 5, 6, 7, lease_ms=1000)
    else:
        state.clear("rich")
        rich.reserve(8)
    rich_blocks = state.list_pools()[0].sealed_blocks
    assert len(attach(state, spec("poor"), name="b").reserve(1)) == 0
    assert owned(state) == {"rich": 2, "poor": 0}
    assert state.list_pools()[0].sealed_blocks == rich_blocks


def test_children_of_a_taken_extents_blocks_become_orphans_that_can_go() -> None:
    state = StoreState(settings(extents=3))
    rich = attach(state, spec("rich"), name="a")
    rich.save_chain(*range(12))
    rich.match(*range(12))
    poor = attach(state, spec("poor"), name="b")
    assert len(poor.reserve(4)) == 4
    rows = {row.key: row for row in state.list_blocks("rich", 1000, "").blocks}
    assert len(rows) == 8
    assert sum(row.parent == b"" for row in rows.values()) in (1, 2)
    for row in rows.values():
        assert row.parent == b"" or row.parent in rows
        assert row.children == sum(other.parent == row.key for other in rows.values())
    assert len(rich.reserve(8)) == 8


def test_generations_of_an_extent_go_on_in_the_next_pool() -> None:
    state = StoreState(settings(extents=1))
    first = attach(state, spec("a"), name="a")
    for _ in range(5):
        first.release(grant=first.reserve(4))
    first.leave()
    second = attach(state, spec("b", slot_pages=2), name="b")
    assert second.reserve(2).generations.tolist() == [6, 6]


def test_the_tick_keeps_slots_free() -> None:
    state = StoreState(settings(extents=2, free_low=0.25, free_high=0.5))
    engine = attach(state)
    engine.save(*range(6))
    state.tick(0)
    assert left(state, *range(8)) == list(range(6))  # a quarter is free: not below the mark
    engine.save(6)
    state.tick(0)
    assert left(state, *range(8)) == [3, 4, 5, 6]


def test_a_short_tick_goes_on_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tick evicts so much and no more; the ones after it go on up to the high mark."""
    monkeypatch.setattr("kvsieve_store.state.store._TICK_EVICTIONS", 1)
    state = StoreState(settings(extents=2, free_low=0.25, free_high=0.5))
    attach(state).save(*range(7))
    sealed = []
    for _ in range(5):
        state.tick(0)
        sealed.append(state.totals().sealed_blocks)
    assert sealed == [6, 5, 4, 4, 4]


def test_the_tick_does_not_evict_while_the_pool_can_grow() -> None:
    state = StoreState(settings(extents=2, free_low=0.5, free_high=1.0))
    attach(state).save(1, 2, 3, 4)
    state.tick(0)
    assert left(state, 1, 2, 3, 4) == [1, 2, 3, 4]


def test_the_tick_gives_back_what_an_empty_pool_without_sessions_owns() -> None:
    state = StoreState(settings())
    engine = attach(state)
    engine.reserve(1)
    state.end_session(engine.id, 0)
    state.tick(1)
    assert owned(state) == {"pool": 1}
    state.fenced(engine.id)
    state.tick(2)
    assert state.list_pools() == []
    assert state.totals().owned_bytes == 0


def test_a_pool_with_blocks_outlives_its_sessions() -> None:
    state = StoreState(settings())
    engine = attach(state)
    engine.save(1)
    engine.leave()
    state.tick(1e9)
    assert len(attach(state, name="b").match(1).slots) == 1
