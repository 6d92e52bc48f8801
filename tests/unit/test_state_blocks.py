"""StoreState: reserve, seal, match, release, and what they refuse."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import InvalidRequestError, SlotNotHeldError
from kvsieve_store.protocol.limits import MAX_BATCH, MAX_LEASE_MS, MAX_MATCH_KEYS
from kvsieve_store.state import Grant, StoreState
from tests.unit.state_driver import ROOT, Engine, attach, freeze, key, keys, settings, u32


@pytest.fixture
def state() -> StoreState:
    return StoreState(settings(extents=8))


@pytest.fixture
def engine(state: StoreState) -> Engine:
    return attach(state)


def block(state: StoreState, number: int):
    [found] = [row for row in state.list_blocks("pool", 1000, "").blocks if row.key == key(number)]
    return found


def test_a_generation_goes_up_at_each_grant(engine: Engine) -> None:
    first = engine.reserve(2)
    engine.release(grant=first)
    second = engine.reserve(2)
    assert second.slots.tolist() == first.slots.tolist()
    assert second.generations.tolist() == [2, 2]


def test_what_is_sealed_is_matched(engine: Engine) -> None:
    grant = engine.save_chain(1, 2, 3)
    match = engine.match(1, 2, 3)
    assert match.slots.tolist() == grant.slots.tolist()
    assert match.generations.tolist() == grant.generations.tolist()
    assert match.lease_id == 0


def test_what_is_only_written_is_not_matched(engine: Engine) -> None:
    engine.reserve(1)
    assert len(engine.match(1).slots) == 0


def test_match_stops_at_the_first_unknown_key(engine: Engine) -> None:
    engine.save(1, 2, 4)
    assert len(engine.match(1, 2, 3, 4).slots) == 2
    assert len(engine.match(3, 1).slots) == 0
    counters = engine.state.counters()["pool"]
    assert (counters.matched_blocks, counters.missed_blocks) == (2, 4)


def test_a_match_may_be_longer_than_one_step(state: StoreState) -> None:
    """Look-ups go in steps of 2,048 keys; a key given twice is found twice."""
    engine = attach(state)
    engine.save(1, 2)
    assert len(engine.match(*([1, 2] * 2000)).slots) == 4000
    assert len(engine.match(*([1] * 2048 + [3] + [1] * 10)).slots) == 2048
    assert len(engine.match(*([1] * 2047 + [3])).slots) == 2047


def test_nothing_matched_nothing_leased(engine: Engine) -> None:
    assert engine.match(1, lease_ms=100).lease_id == 0
    assert engine.state.totals().leases == 0


def test_a_lease_covers_what_matched(engine: Engine) -> None:
    engine.save(1, 2)
    lease = engine.match(1, 9, lease_ms=100).lease_id
    assert (block(engine.state, 1).leases, block(engine.state, 2).leases) == (1, 0)
    assert engine.release(lease).leases == 1
    assert block(engine.state, 1).leases == 0


def test_a_key_given_twice_is_leased_and_let_go_alike(engine: Engine) -> None:
    engine.save(1)
    lease = engine.match(1, 1, 1, lease_ms=100).lease_id
    engine.release(lease)
    assert block(engine.state, 1).leases == 0


def test_a_key_that_is_there_is_a_duplicate_and_its_slot_free(engine: Engine) -> None:
    old = engine.save(1)
    grant = engine.reserve(2)
    assert engine.seal(grant, keys(1, 2)).status.tolist() == [2, 1]
    assert engine.match(1).slots.tolist() == old.slots.tolist()
    [pool] = engine.state.list_pools()
    assert (pool.free_slots, pool.writing_slots, pool.sealed_blocks) == (2, 0, 2)
    assert engine.state.counters()["pool"].duplicate_blocks == 1
    assert engine.reserve(1).slots.tolist() == grant.slots[:1].tolist()


def test_a_key_twice_in_a_batch_is_sealed_once(engine: Engine) -> None:
    grant = engine.reserve(3)
    assert engine.seal(grant, keys(1, 1, 2)).status.tolist() == [1, 2, 1]
    assert engine.match(1).slots.tolist() == grant.slots[:1].tolist()


def test_parents_are_linked(engine: Engine) -> None:
    engine.save_chain(1, 2, 3)
    engine.seal(engine.reserve(1), key(4), key(2))
    assert [block(engine.state, n).parent for n in (1, 2, 3, 4)] == [b"", key(1), key(2), key(2)]
    assert [block(engine.state, n).children for n in (1, 2, 3, 4)] == [1, 2, 0, 0]


def test_a_parent_that_was_a_duplicate_is_the_older_block(engine: Engine) -> None:
    engine.save(1)
    engine.save_chain(1, 2)
    assert block(engine.state, 2).parent == key(1)


def test_a_missing_parent_makes_an_orphan(engine: Engine) -> None:
    engine.seal(engine.reserve(1), key(2), key(1))
    engine.save(1)
    assert block(engine.state, 2).parent == b""
    assert block(engine.state, 1).children == 0


def test_no_block_is_its_own_ancestor(engine: Engine) -> None:
    """A parent later in the batch, or the block itself, counts as missing."""
    engine.seal(engine.reserve(3), keys(1, 2, 3), keys(2, 1, 3))
    assert [block(engine.state, n).parent for n in (1, 2, 3)] == [b"", key(1), b""]


@pytest.mark.parametrize(
    ("message", "block_keys", "parents", "slots", "generations"),
    [
        (r"keys: 33 bytes given, a multiple of 32 required", bytes(33), ROOT, [0], [1]),
        (r"keys: 0 keys given, 1 to 4096 allowed", b"", b"", [], []),
        (r"keys: 4097 keys given", bytes(32 * (MAX_BATCH + 1)), ROOT, [0], [1]),
        (r"parents: 31 bytes given", key(1), bytes(31), [0], [1]),
        (r"parents: 2 entries given, 1 required as in keys", key(1), bytes(64), [0], [1]),
        (r"slots: 2 entries given, 1 required", key(1), ROOT, [0, 1], [1]),
        (r"generations: 0 entries given, 1 required", key(1), ROOT, [0], []),
        (r"keys\[1\]: all zero", key(1) + ROOT, ROOT * 2, [0, 1], [1, 1]),
    ],
)
def test_seal_names_the_malformed_field(
    engine: Engine, message, block_keys, parents, slots, generations
) -> None:
    engine.reserve(2)
    before = freeze(engine.state)
    with pytest.raises(InvalidRequestError, match=message):
        engine.state.seal(engine.id, block_keys, parents, u32(*slots), u32(*generations), 1.0)
    assert freeze(engine.state) == before


@pytest.mark.parametrize(
    ("message", "slots", "generations"),
    [
        (r"slots\[1\]: slot 2 is not held by this session", [0, 2], [1, 1]),  # another session's
        (r"slots\[1\]: slot 3 is not held by this session", [0, 3], [1, 1]),  # free
        (r"slots\[0\]: slot 31 is not held by this session", [31, 0], [0, 1]),  # not the pool's
        (r"slots\[0\]: slot 4294967295 is not held by this session", [2**32 - 1, 0], [1, 1]),
        (r"generations\[1\]: slot 1 is held under generation 1, 2 given", [0, 1], [1, 2]),
        (r"slots\[1\]: slot 0 is given twice", [0, 0], [1, 1]),
    ],
)
def test_seal_and_release_refuse_slots_that_are_not_held(
    state: StoreState, message, slots, generations
) -> None:
    engine, other = attach(state, name="a"), attach(state, name="b")
    engine.reserve(2)
    other.reserve(1)
    before = freeze(state)
    with pytest.raises(SlotNotHeldError, match=message):
        state.seal(engine.id, keys(1, 2), bytes(64), u32(*slots), u32(*generations), 1.0)
    with pytest.raises(SlotNotHeldError, match=message):
        state.release(engine.id, [], u32(*slots), u32(*generations), 1.0)
    assert freeze(state) == before


def test_a_sealed_slot_cannot_be_sealed_or_released_again(engine: Engine) -> None:
    grant = engine.save(1)
    for call in (lambda: engine.seal(grant, key(2)), lambda: engine.release(grant=grant)):
        with pytest.raises(SlotNotHeldError):
            call()


def test_match_names_the_malformed_field(engine: Engine) -> None:
    engine.save(1)
    before = freeze(engine.state)
    for message, block_keys, lease_ms in (
        ("keys: 31 bytes given", bytes(31), 0),
        ("keys: 0 keys given", b"", 0),
        (f"keys: {MAX_MATCH_KEYS + 1} keys given", bytes(32 * (MAX_MATCH_KEYS + 1)), 0),
        ("lease_ms: 600001 given, 0 to 600000 allowed", key(1), MAX_LEASE_MS + 1),
        ("lease_ms: -1 given", key(1), -1),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.state.match(engine.id, block_keys, lease_ms, 1.0)
    assert freeze(engine.state) == before


def test_reserve_and_release_name_the_malformed_field(engine: Engine) -> None:
    state, none = engine.state, u32()
    many = u32(*range(MAX_BATCH + 1))
    before = freeze(state)
    for message, call in (
        ("count: 0 given", lambda: engine.reserve(0)),
        ("count: 4097 given, 1 to 4096 allowed", lambda: engine.reserve(MAX_BATCH + 1)),
        ("lease_ids", lambda: state.release(engine.id, range(MAX_BATCH + 1), none, none, 1.0)),
        ("slots", lambda: state.release(engine.id, [], many, many, 1.0)),
        ("generations: 0 entries given, 1 required", lambda: state.release(engine.id, [], u32(0), none, 1.0)),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            call()
    assert freeze(state) == before


def test_reserve_grants_what_there_is(state: StoreState) -> None:
    engine = attach(state)
    assert len(engine.reserve(40)) == 32
    assert len(engine.reserve(1)) == 0
    counters = state.counters()["pool"]
    assert (counters.granted_slots, counters.denied_slots) == (32, 9)


def test_release_of_nothing_is_no_error(engine: Engine) -> None:
    released = engine.release(1, 2, 2, grant=Grant.none())
    assert (released.leases, released.slots) == (0, 0)
