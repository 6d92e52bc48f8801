"""StoreState: seals that lease what they seal, and leave duplicates with the session."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import CapacityError, InvalidRequestError
from kvsieve_store.protocol.limits import MAX_LEASE_MS
from kvsieve_store.state import Grant, StoreState
from tests.unit.state_driver import Engine, attach, freeze, has, keys, settings


@pytest.fixture
def state() -> StoreState:
    return StoreState(settings(extents=8))


@pytest.fixture
def engine(state: StoreState) -> Engine:
    return attach(state)


def leases(state: StoreState) -> list[int]:
    """Leases of each block, oldest first."""
    return [row.leases for row in state.list_blocks("pool", 0, "").blocks]


def part(grant: Grant, start: int, end: int) -> Grant:
    return Grant(grant.slots[start:end], grant.generations[start:end])


def test_what_is_sealed_is_leased_in_the_same_step(engine: Engine) -> None:
    engine.seal(engine.reserve(1), keys(9))
    sealed = engine.seal(engine.reserve(2), keys(1, 2), lease_ms=1000)
    assert sealed.status.tolist() == [1, 1]
    assert sealed.lease_id > 0
    assert (leases(engine.state), engine.session.leased) == ([0, 1, 1], 2)
    assert engine.release(sealed.lease_id).leases == 1
    assert (leases(engine.state), engine.session.leased) == ([0, 0, 0], 0)


def test_without_lease_ms_nothing_is_leased(engine: Engine) -> None:
    assert engine.seal(engine.reserve(1), keys(1)).lease_id == 0
    assert engine.state.totals().leases == 0


def test_a_duplicate_stays_with_the_session_until_released(engine: Engine) -> None:
    old = engine.save(2)
    grant = engine.reserve(3)
    sealed = engine.seal(grant, keys(1, 2, 3), lease_ms=1000)
    assert sealed.status.tolist() == [1, 2, 1]
    assert engine.match(2).slots.tolist() == old.slots.tolist()
    [pool] = engine.state.list_pools()
    assert (pool.writing_slots, pool.sealed_blocks, engine.session.held) == (1, 3, 1)
    assert (leases(engine.state), engine.session.leased) == ([0, 1, 1], 2)
    assert engine.state.counters()["pool"].duplicate_blocks == 1
    released = engine.release(sealed.lease_id, grant=part(grant, 1, 2))
    assert (released.leases, released.slots) == (1, 1)
    [pool] = engine.state.list_pools()
    assert (pool.writing_slots, engine.session.held) == (0, 0)


def test_a_kept_duplicate_can_be_sealed_once_the_older_block_is_gone(engine: Engine) -> None:
    engine.save(1)
    grant = engine.reserve(1)
    assert engine.seal(grant, keys(1), lease_ms=1000).status.tolist() == [2]
    assert engine.seal(grant, keys(1), lease_ms=1000).status.tolist() == [2]
    engine.state.clear("pool")
    assert engine.seal(grant, keys(1), lease_ms=1000).status.tolist() == [1]
    assert engine.match(1).slots.tolist() == grant.slots.tolist()


def test_a_key_twice_in_a_batch_is_sealed_and_leased_once(engine: Engine) -> None:
    sealed = engine.seal(engine.reserve(2), keys(1, 1), lease_ms=1000)
    assert sealed.status.tolist() == [1, 2]
    assert (leases(engine.state), engine.session.held) == ([1], 1)


def test_only_duplicates_make_no_lease(engine: Engine) -> None:
    engine.save(1, 2)
    sealed = engine.seal(engine.reserve(2), keys(1, 2), lease_ms=1000)
    assert (sealed.status.tolist(), sealed.lease_id) == ([2, 2], 0)
    assert (engine.state.totals().leases, engine.session.held) == (0, 2)


def test_kept_duplicates_count_against_the_credits(state: StoreState) -> None:
    """Eight credits: what was sealed is topped up, what is kept is not, and its release is made up for."""
    attach(state, name="other").save(1, 2, 3)
    engine = attach(state, credits=4)
    sealed = engine.seal(engine.first_grant, keys(1, 2, 3, 4), lease_ms=1000)
    assert (sealed.status.tolist(), len(sealed.grant), engine.session.held) == ([2, 2, 2, 1], 1, 4)
    engine.release(grant=part(engine.first_grant, 0, 3))
    assert engine.session.held == 1
    [(_, grant)] = state.top_up(0.0)
    assert (len(grant), engine.session.held) == (3, 4)


def test_the_top_up_takes_nothing_that_was_just_sealed(state: StoreState) -> None:
    """In a full arena the credits for a seal come from other blocks, or not at all."""
    engine = attach(state, credits=4)
    rest = engine.reserve(28)
    sealed = engine.seal(engine.first_grant, keys(*range(4)), lease_ms=1000)
    assert len(sealed.grant) == 0
    sealed = engine.seal(rest, keys(*range(4, 32)), lease_ms=1000)
    assert (len(sealed.grant), len(engine.reserve(1)), engine.session.held) == (0, 0, 0)
    assert leases(state) == [1] * 32
    engine.release(sealed.lease_id)
    assert len(engine.reserve(32)) == 28
    assert all(has(state, n) for n in range(4))


def test_a_seals_lease_ends_with_time_and_is_renewed(state: StoreState, engine: Engine) -> None:
    lease = engine.seal(engine.reserve(1), keys(1), lease_ms=1000).lease_id
    state.tick(0.9)
    state.heartbeat(engine.id, [lease], 0.9)
    state.tick(1.8)
    assert leases(state) == [1]
    state.tick(2.0)
    assert leases(state) == [0]
    assert engine.release(lease).leases == 0


def test_what_a_request_seals_over_time_is_one_lease(engine: Engine) -> None:
    engine.save(1, 2)
    lease = engine.match(1, 2, lease_ms=1000).lease_id
    for n in (3, 4, 5):
        assert engine.seal(engine.reserve(1), keys(n), lease_ms=1000, lease_id=lease).lease_id == lease
    assert (engine.session.leases, engine.session.leased) == ({lease}, 5)
    assert leases(engine.state) == [1] * 5
    assert engine.release(lease).leases == 1
    assert (leases(engine.state), engine.session.leased) == ([0] * 5, 0)


def test_what_is_added_lasts_as_long_as_it_was_leased_for(state: StoreState, engine: Engine) -> None:
    lease = engine.seal(engine.reserve(1), keys(1), lease_ms=1000).lease_id
    engine.now = 0.9
    engine.seal(engine.reserve(1), keys(2), lease_ms=3000, lease_id=lease)
    state.tick(3.8)
    assert leases(state) == [1, 1]
    state.heartbeat(engine.id, [lease], 3.8)  # by the longer of both lengths
    state.tick(6.7)
    assert leases(state) == [1, 1]
    state.tick(6.8)
    assert leases(state) == [0, 0]


def test_a_short_addition_does_not_shorten_the_lease(state: StoreState, engine: Engine) -> None:
    lease = engine.seal(engine.reserve(1), keys(1), lease_ms=5000).lease_id
    engine.seal(engine.reserve(1), keys(2), lease_ms=1000, lease_id=lease)
    state.tick(4.9)
    assert leases(state) == [1, 1]


@pytest.mark.parametrize("gone", ["released", "expired", "another session's", "never there"])
def test_a_lease_that_is_gone_is_replaced_by_a_new_one(state: StoreState, engine: Engine, gone: str) -> None:
    owner = attach(state, name="other") if gone == "another session's" else engine
    lease = owner.seal(owner.reserve(1), keys(1), lease_ms=1000).lease_id
    if gone == "released":
        engine.release(lease)
    elif gone == "expired":
        state.tick(1.0)
        engine.now = 1.0
    elif gone == "never there":
        lease += 1000
    new = engine.seal(engine.reserve(1), keys(2), lease_ms=1000, lease_id=lease).lease_id
    assert new not in (0, lease)
    engine.release(new)
    assert leases(state)[1] == 0


def test_duplicates_add_nothing(engine: Engine) -> None:
    lease = engine.seal(engine.reserve(1), keys(1), lease_ms=1000).lease_id
    again = engine.seal(engine.reserve(1), keys(1), lease_ms=1000, lease_id=lease)
    assert (again.status.tolist(), again.lease_id, engine.session.leased) == ([2], 0, 1)


def test_a_lease_to_add_to_without_a_length_is_refused(engine: Engine) -> None:
    lease = engine.seal(engine.reserve(1), keys(1), lease_ms=1000).lease_id
    grant = engine.reserve(1)
    before = freeze(engine.state)
    with pytest.raises(InvalidRequestError, match=f"lease_id: {lease} given without lease_ms"):
        engine.seal(grant, keys(2), lease_id=lease)
    assert freeze(engine.state) == before


def test_requests_without_end_need_one_lease_each(
    state: StoreState, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many leases as a session may have, and each of them grows until the arena is full."""
    monkeypatch.setattr("kvsieve_store.state.leases.MAX_LEASES", 2)
    mine = [engine.seal(engine.reserve(1), keys(n), lease_ms=1000).lease_id for n in range(2)]
    for n in range(2, 32):
        lease = mine[n % 2]
        assert engine.seal(engine.reserve(1), keys(n), lease_ms=1000, lease_id=lease).lease_id == lease
    assert leases(state) == [1] * 32
    assert len(engine.reserve(1)) == 0
    monkeypatch.setattr("kvsieve_store.state.leases.MAX_LEASED", 31)
    engine.release(mine[0])
    grant = engine.reserve(16)
    before = freeze(state)
    with pytest.raises(CapacityError, match="keys: 16 more slots to lease, the session's leases have 16, 31"):
        engine.seal(grant, keys(*range(100, 116)), lease_ms=1000, lease_id=mine[1])
    assert freeze(state) == before


def test_the_end_of_the_session_gives_back_leases_and_duplicates(state: StoreState, engine: Engine) -> None:
    engine.save(1)
    engine.seal(engine.reserve(2), keys(1, 2), lease_ms=1000)
    state.end_session(engine.id, 0.0)
    state.tick(5.0)
    assert (leases(state), state.list_pools()[0].writing_slots) == ([0, 1], 1)
    state.fenced(engine.id)
    assert (leases(state), state.list_pools()[0].writing_slots) == ([0, 0], 0)


def test_a_draining_store_still_seals_with_a_lease(state: StoreState, engine: Engine) -> None:
    grant = engine.reserve(1)
    state.drain()
    assert engine.seal(grant, keys(1), lease_ms=1000).lease_id > 0


@pytest.mark.parametrize("lease_ms", [MAX_LEASE_MS + 1, -1])
def test_a_lease_that_is_too_long_is_refused(engine: Engine, lease_ms: int) -> None:
    grant = engine.reserve(1)
    before = freeze(engine.state)
    with pytest.raises(InvalidRequestError, match=f"lease_ms: {lease_ms} given, 0 to 600000 allowed"):
        engine.seal(grant, keys(1), lease_ms=lease_ms)
    assert freeze(engine.state) == before


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_LEASED", 3, "keys: 2 more slots to lease, the session's leases have 2, 3 allowed in all"),
        ("MAX_LEASES", 1, "lease_ms: the session has 1 leases, the most"),
    ],
)
def test_what_a_session_leases_is_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    monkeypatch.setattr(f"kvsieve_store.state.leases.{limit}", value)
    lease = engine.seal(engine.reserve(2), keys(1, 2), lease_ms=1000).lease_id
    grant = engine.reserve(3)
    before = freeze(engine.state)
    with pytest.raises(CapacityError, match=message):
        engine.seal(grant, keys(3, 4, 1), lease_ms=1000)
    assert freeze(engine.state) == before
    assert engine.seal(part(grant, 2, 3), keys(1), lease_ms=1000).status.tolist() == [2]  # leases nothing
    engine.release(lease)
    assert engine.seal(grant, keys(3, 4, 1), lease_ms=1000).lease_id > 0
