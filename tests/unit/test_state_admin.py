"""StoreState: what operators may do."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import InvalidRequestError, NotFoundError
from kvsieve_store.state import Cleared, Evicted, Pinned, StoreState, Unpinned
from tests.unit.state_driver import EXTENT_BYTES, Engine, attach, freeze, has, key, keys, settings, spec


@pytest.fixture
def state() -> StoreState:
    return StoreState(settings(extents=4))


@pytest.fixture
def engine(state: StoreState) -> Engine:
    return attach(state)


def left(state: StoreState, *numbers: int) -> list[int]:
    return [number for number in numbers if has(state, number)]


def test_evicting_a_block_takes_its_descendants(state: StoreState, engine: Engine) -> None:
    engine.save_chain(1, 2, 3, 4)
    engine.seal(engine.reserve(1), key(5), key(2))
    assert state.evict("pool", keys(3, 9), 0, 0) == Evicted(2, 0, 1)
    assert left(state, 1, 2, 3, 4, 5) == [1, 2, 5]
    assert state.evict("pool", keys(2, 2, 5), 0, 0) == Evicted(2, 0, 0)
    assert left(state, 1, 2, 3, 4, 5) == [1]


@pytest.mark.parametrize("hold", ["lease", "pin"])
def test_evicting_skips_what_has_a_held_descendant(state: StoreState, engine: Engine, hold: str) -> None:
    engine.save_chain(1, 2, 3)
    engine.seal(engine.reserve(1), key(4), key(1))
    if hold == "pin":
        state.pin("pool", key(2))
    else:
        engine.match(2, lease_ms=1000)
    assert state.evict("pool", keys(1, 2, 3, 4), 0, 0) == Evicted(2, 2, 0)
    assert left(state, 1, 2, 3, 4) == [1, 2]


def test_evicting_by_count_takes_the_coldest(state: StoreState, engine: Engine) -> None:
    engine.save(1, 2, 3, 4)
    engine.match(1)
    state.pin("pool", key(2))
    assert state.evict("pool", b"", 2, 0) == Evicted(2, 0, 0)
    assert left(state, 1, 2, 3, 4) == [1, 2]
    assert state.evict("pool", b"", 100, 0) == Evicted(1, 1, 0)
    assert left(state, 1, 2, 3, 4) == [2]


def test_pins_hold_until_they_are_taken_away(state: StoreState, engine: Engine) -> None:
    engine.save(1, 2, 3)
    assert state.pin("pool", keys(1, 2, 9)) == Pinned(2, 1)
    assert state.list_pools()[0].pinned_blocks == 2
    assert state.unpin("pool", keys(1, 3, 8)) == Unpinned(1, 1)
    assert state.unpin("pool", b"") == Unpinned(1, 0)
    assert state.list_pools()[0].pinned_blocks == 0


def test_clear_spares_only_what_is_leased(state: StoreState, engine: Engine) -> None:
    engine.save_chain(1, 2, 3)
    state.pin("pool", key(3))
    lease = engine.match(1, 2, lease_ms=1000).lease_id
    assert state.clear("pool") == Cleared(1, 2)
    engine.release(lease)
    assert state.clear("") == Cleared(2, 0)
    assert state.counters()["pool"].cleared_blocks == 3


def test_clear_makes_orphans_of_leased_children(state: StoreState, engine: Engine) -> None:
    engine.save_chain(1, 2)
    engine.match(2, lease_ms=1000)
    state.clear("pool")
    [row] = state.list_blocks("pool", 0, "").blocks
    assert (row.key, row.parent) == (key(2), b"")


def test_clear_of_all_pools(state: StoreState) -> None:
    attach(state, spec("a"), name="a").save(1, 2)
    attach(state, spec("b"), name="b").save(1)
    assert state.clear("") == Cleared(3, 0)


def test_a_block_whose_slot_was_reused_is_not_pinned(state: StoreState, engine: Engine) -> None:
    engine.save(1)
    state.pin("pool", key(1))
    state.clear("pool")
    engine.save(1)
    assert not state.list_blocks("pool", 0, "").blocks[0].pinned


def test_blocks_are_listed_page_by_page(state: StoreState, engine: Engine) -> None:
    engine.save(*range(10))
    found, token, pages = [], "", 0
    while True:
        page = state.list_blocks("pool", 4, token)
        found += [block.key for block in page.blocks]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert pages == 3
    assert sorted(found) == sorted(key(number) for number in range(10))


def test_a_full_last_page_has_no_token(state: StoreState, engine: Engine) -> None:
    engine.save(1, 2)
    assert state.list_blocks("pool", 2, "").next_page_token == ""


def test_a_listed_block_says_all(state: StoreState, engine: Engine) -> None:
    grant = engine.save_chain(1, 2)
    engine.match(1, 2, lease_ms=1000)
    state.pin("pool", key(2))
    _, row = sorted(state.list_blocks("pool", 0, "").blocks, key=lambda row: row.slot)
    assert (row.key, row.parent, row.slot, row.generation) == (key(2), key(1), grant.slots[1], 1)
    assert (row.leases, row.pinned, row.visited, row.children) == (1, True, True, 0)


def test_pools_are_listed(state: StoreState, engine: Engine) -> None:
    engine.save(1, 2)
    engine.reserve(1)
    engine.match(1, lease_ms=1000)
    [row] = state.list_pools()
    assert (row.name, row.pool_id, row.model) == ("pool", spec().pool_id().hex(), "model")
    assert (row.owned_bytes, row.quota_bytes, row.slot_bytes) == (EXTENT_BYTES, 4 * EXTENT_BYTES, 4096)
    assert (row.free_slots, row.writing_slots, row.sealed_blocks) == (1, 1, 2)
    assert (row.leased_blocks, row.pinned_blocks, row.sessions) == (1, 0, 1)
    assert (row.matched_blocks, row.evicted_blocks) == (1, 0)


def test_totals(state: StoreState, engine: Engine) -> None:
    engine.save(1, 2)
    engine.match(1, lease_ms=1000)
    totals = state.totals()
    assert (totals.arena_bytes, totals.owned_bytes, totals.sealed_bytes) == (
        4 * EXTENT_BYTES,
        EXTENT_BYTES,
        2 * 4096,
    )
    assert (totals.pools, totals.sessions, totals.fencing_sessions) == (1, 1, 0)
    assert (totals.sealed_blocks, totals.leases) == (2, 1)


def test_a_pool_goes_by_name_or_by_a_prefix_of_its_id(state: StoreState, engine: Engine) -> None:
    engine.save(1)
    pool_id = spec().pool_id().hex()
    for ref in ("pool", pool_id, pool_id[:8], pool_id[:8].upper()):
        assert len(state.list_blocks(ref, 0, "").blocks) == 1
    for ref in (pool_id[:7], "", "other", "0" * 64):
        with pytest.raises(NotFoundError, match="pool: no pool has the name"):
            state.list_blocks(ref, 0, "")


def test_operators_errors_name_the_field(state: StoreState, engine: Engine) -> None:
    engine.save(1)
    before = freeze(state)
    for message, call in (
        ("keys, count", lambda: state.evict("pool", b"", 0, 0)),
        ("keys, count", lambda: state.evict("pool", key(1), 1, 0)),
        ("keys: 5 bytes", lambda: state.evict("pool", b"12345", 0, 0)),
        ("count: -1", lambda: state.evict("pool", b"", -1, 0)),
        ("keys: 0 keys", lambda: state.pin("pool", b"")),
        ("keys: 1 bytes", lambda: state.unpin("pool", b"1")),
        ("page_size: 1001", lambda: state.list_blocks("pool", 1001, "")),
        ("page_token", lambda: state.list_blocks("pool", 1, "x")),
        ("page_token", lambda: state.list_blocks("pool", 1, "-1")),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            call()
    for call in (
        lambda: state.evict("other", key(1), 0, 0),
        lambda: state.pin("other", key(1)),
        lambda: state.unpin("other", b""),
        lambda: state.clear("other"),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert freeze(state) == before
