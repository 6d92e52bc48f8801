"""StoreState: attaching, credits, leases in time, ending, fencing, draining."""

from __future__ import annotations

import numpy as np
import pytest

from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PoolMismatchError,
    SettingsError,
    UnavailableError,
)
from kvsieve_store.protocol.limits import MAX_BATCH, MAX_CREDITS, MAX_LEASE_MS
from kvsieve_store.state import StoreState
from tests.unit.state_driver import EXTENT_BYTES, attach, freeze, has, key, keys, settings, spec, u32


@pytest.fixture
def state() -> StoreState:
    return StoreState(settings())


def test_attach_grants_the_credit_target(state: StoreState) -> None:
    engine = attach(state, credits=3)
    assert engine.first_grant.slots.tolist() == [0, 1, 2]
    assert engine.first_grant.generations.tolist() == [1, 1, 1]
    assert engine.session.pool_id == spec().pool_id()
    assert engine.session.layout.slots_per_extent == 4


def test_a_second_engine_shares_the_pool(state: StoreState) -> None:
    attach(state, name="a").save(1)
    assert len(attach(state, name="b").match(1).slots) == 1


def test_another_spec_under_the_name_is_refused_and_the_difference_named(state: StoreState) -> None:
    attach(state)
    before = freeze(state)
    with pytest.raises(PoolMismatchError, match=r"model: 'other'.*'model'.*kvsieve clear pool.*kvsieve.pool"):
        attach(state, spec(model="other"), name="b")
    assert freeze(state) == before


def test_another_spec_is_refused_while_blocks_are_left_and_taken_after_clear(state: StoreState) -> None:
    engine = attach(state)
    engine.save(1)
    engine.leave()
    with pytest.raises(PoolMismatchError):
        attach(state, spec(model="other"), name="b")
    state.clear("pool")
    attach(state, spec(model="other"), name="b")
    assert [pool.model for pool in state.list_pools()] == ["other"]


def test_another_spec_is_refused_while_an_ended_session_is_not_fenced(state: StoreState) -> None:
    engine = attach(state, credits=1)
    state.end_session(engine.id, 0)
    with pytest.raises(PoolMismatchError):
        attach(state, spec(model="other"), name="b")
    state.fenced(engine.id)
    attach(state, spec(model="other"), name="b")


def test_generations_of_a_replaced_pool_go_on(state: StoreState) -> None:
    engine = attach(state)
    for _ in range(3):
        engine.release(grant=engine.reserve(1))
    engine.leave()
    again = attach(state, spec(model="other"), name="b")
    assert again.reserve(1).generations.tolist() == [4]


def test_a_slot_larger_than_an_extent_is_refused(state: StoreState) -> None:
    before = freeze(state)
    with pytest.raises(CapacityError, match=r"pool\.planes.*--extent-size"):
        attach(state, spec(slot_pages=6))
    assert freeze(state) == before


def test_session_limit_counts_sessions_that_wait_for_fencing() -> None:
    state = StoreState(settings(max_sessions=1))
    engine = attach(state)
    state.end_session(engine.id, 0)
    with pytest.raises(CapacityError, match="1 of at most 1 are there, 1 have ended"):
        attach(state, name="b")
    state.fenced(engine.id)
    attach(state, name="b")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("engine_id", {"engine_id": ""}),
        ("engine_id", {"engine_id": "x" * 257}),
        ("client", {"client": "x" * 257}),
        ("credit_target", {"credit_target": MAX_CREDITS + 1}),
        ("credit_target", {"credit_target": -1}),
    ],
)
def test_attach_names_the_bad_field(state: StoreState, field: str, values: dict) -> None:
    good = {
        "engine_id": "e",
        "client": "c",
        "pid": 1,
        "credit_target": 0,
        "session_id": b"s" * 16,
        "now": 0.0,
    }
    before = freeze(state)
    with pytest.raises(InvalidRequestError, match=field):
        state.attach(spec(), **(good | values))
    assert freeze(state) == before


def test_a_session_id_is_not_taken_twice(state: StoreState) -> None:
    attach(state, name="a")
    with pytest.raises(InvalidRequestError, match="session_id"):
        attach(state, name="a")


def test_unknown_and_ended_sessions_are_not_found(state: StoreState) -> None:
    engine = attach(state)
    state.end_session(engine.id, 0)
    none = u32()
    for session_id in (engine.id, b"?" * 16):
        for call in (
            lambda i: state.heartbeat(i, [], 0),
            lambda i: state.match(i, key(1), 0, 0),
            lambda i: state.reserve(i, 1, 0),
            lambda i: state.seal(i, key(1), bytes(32), u32(0), u32(1), 0),
            lambda i: state.release(i, [], none, none, 0),
        ):
            with pytest.raises(NotFoundError, match="session_id"):
                call(session_id)
    for call in (state.fenced, lambda i: state.end_session(i, 0)):
        with pytest.raises(NotFoundError, match="session_id"):
            call(b"?" * 16)


def test_seal_tops_the_session_up(state: StoreState) -> None:
    engine = attach(state, credits=3)
    sealed = engine.seal(engine.first_grant, keys(1, 2))
    assert sealed.status.tolist() == [1, 1]
    assert len(sealed.grant) == 2


def test_release_leaves_the_top_up_to_top_up(state: StoreState) -> None:
    engine = attach(state, credits=2)
    assert engine.release(grant=engine.first_grant).slots == 2
    [(session_id, grant)] = state.top_up(0)
    assert session_id == engine.id
    assert grant.slots.tolist() == [0, 1]
    assert grant.generations.tolist() == [2, 2]
    assert state.top_up(0) == []


def test_reserved_slots_count_towards_the_credits(state: StoreState) -> None:
    engine = attach(state, credits=2)
    burst = engine.reserve(3)
    assert len(engine.seal(burst, keys(1, 2, 3)).grant) == 0


def test_top_up_comes_when_slots_are_there_again() -> None:
    state = StoreState(settings(extents=1))
    a, b = attach(state, name="a"), attach(state, name="b", credits=1)
    a.reserve(3)
    b.release(grant=b.first_grant)
    a.reserve(1)
    assert state.top_up(0) == []
    a.leave()
    [(session_id, grant)] = state.top_up(0)
    assert (session_id, len(grant)) == (b.id, 1)


def test_credits_keep_to_a_part_of_the_pool() -> None:
    """Engines that ask for all get a quarter of the room together, so that sealed blocks have a place."""
    state = StoreState(settings(extents=12))
    granted = [len(attach(state, name=name, credits=48).first_grant) for name in "abc"]
    assert granted == [48 // 4, 48 // 8, 48 // 12]


def test_silence_is_reported_and_any_call_breaks_it(state: StoreState) -> None:
    a, b, c = (attach(state, name=name) for name in "abc")
    state.heartbeat(a.id, [], 8.0)
    state.match(b.id, key(1), 0, 8.0)
    assert state.tick(10.0) == []
    assert state.tick(10.5) == [c.id]
    state.end_session(c.id, 10.5)
    assert state.tick(11.0) == []


def test_an_ended_session_keeps_slots_and_leases_until_it_is_fenced(state: StoreState) -> None:
    engine = attach(state, credits=2)
    engine.seal(engine.first_grant, key(1))
    engine.match(1, lease_ms=1000)
    state.end_session(engine.id, 1.0)
    state.end_session(engine.id, 2.0)  # twice is as good as once
    state.tick(1e6)
    assert state.fencing() == [engine.id]
    [pool], [session] = state.list_pools(), state.list_sessions(3.0)
    assert (pool.writing_slots, pool.leased_blocks, pool.sessions) == (2, 1, 0)
    assert (session.state, session.held_slots, session.leases) == ("fencing", 2, 1)
    state.fenced(engine.id)
    [pool] = state.list_pools()
    assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 1)
    assert state.fencing() == []
    assert state.list_sessions(3.0) == []


def test_an_attached_session_cannot_be_fenced(state: StoreState) -> None:
    engine = attach(state)
    with pytest.raises(InvalidRequestError, match="end it first"):
        state.fenced(engine.id)


def test_leases_end_with_time(state: StoreState) -> None:
    engine = attach(state)
    engine.save(1)
    lease = engine.match(1, lease_ms=1000).lease_id
    state.tick(0.5)
    assert state.totals().leases == 1
    state.heartbeat(engine.id, [lease, 999], 0.9)
    state.tick(1.5)
    assert state.totals().leases == 1
    state.tick(2.0)
    assert state.totals().leases == 0
    assert state.counters()["pool"].expired_leases == 1
    assert engine.release(lease).leases == 0


def test_lease_ids_are_unique_and_positive(state: StoreState) -> None:
    engine = attach(state)
    engine.save(1)
    ids = []
    for _ in range(3):
        ids.append(engine.match(1, lease_ms=1).lease_id)
        engine.release(ids[-1])
    assert len(set(ids)) == 3
    assert min(ids) > 0


def test_a_session_cannot_touch_the_leases_of_another(state: StoreState) -> None:
    a, b = attach(state, name="a"), attach(state, name="b")
    a.save(1)
    lease = a.match(1, lease_ms=1000).lease_id
    assert b.release(lease).leases == 0
    state.heartbeat(b.id, [lease], 0.9)
    state.tick(1.0)
    assert state.totals().leases == 0


def test_many_released_leases_leave_nothing_behind(state: StoreState) -> None:
    engine = attach(state)
    engine.save(1)
    for _ in range(1000):
        engine.release(engine.match(1, lease_ms=MAX_LEASE_MS).lease_id)
    assert len(state._leases._heap) < 200


def test_a_lease_counts_a_slot_once(state: StoreState) -> None:
    engine = attach(state)
    grant = engine.save(1, 2)
    lease = engine.match(*[2, 1] * 500, lease_ms=1000)
    assert len(lease.slots) == 1000
    assert state._leases._leases[lease.lease_id].slots.tolist() == grant.slots.tolist()
    assert engine.session.leased == 2
    assert [row.leases for row in state.list_blocks("pool", 0, "").blocks] == [1, 1]
    engine.release(lease.lease_id)
    assert [row.leases for row in state.list_blocks("pool", 0, "").blocks] == [0, 0]


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_LEASED", 3, "keys: 2 more slots to lease, the session's leases have 2, 3 allowed in all"),
        ("MAX_LEASES", 1, "lease_ms: the session has 1 leases, the most"),
    ],
)
def test_what_a_session_leases_is_limited(
    state: StoreState, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    monkeypatch.setattr(f"kvsieve_store.state.leases.{limit}", value)
    engine, other = attach(state), attach(state, name="other")
    engine.save(1, 2)
    lease = engine.match(1, 2, lease_ms=1000).lease_id
    before = freeze(state)
    with pytest.raises(CapacityError, match=message):
        engine.match(1, 2, lease_ms=1000)
    assert freeze(state) == before
    assert len(engine.match(1, 2).slots) == 2  # unleased, as much as one likes
    assert other.match(1, 2, lease_ms=1000).lease_id
    engine.release(lease)
    assert engine.match(1, 2, lease_ms=1000).lease_id
    state.tick(1.0)  # time gives back as well
    assert engine.match(1, 2, lease_ms=1000).lease_id


def test_heartbeat_limits_what_it_renews(state: StoreState) -> None:
    engine = attach(state)
    with pytest.raises(InvalidRequestError, match="renew_leases"):
        state.heartbeat(engine.id, range(MAX_BATCH + 1), 0)


def test_draining_grants_and_matches_nothing_but_takes_seals(state: StoreState) -> None:
    engine = attach(state, credits=2)
    other = attach(state, name="other", credits=1)
    state.drain()
    for call in (
        lambda: attach(state, name="late"),
        lambda: engine.match(1),
        lambda: engine.reserve(1),
    ):
        with pytest.raises(UnavailableError, match="draining"):
            call()
    sealed = engine.seal(engine.first_grant, key(1))
    assert sealed.status.tolist() == [1]
    assert len(sealed.grant) == 0
    other.release(grant=other.first_grant)
    assert state.top_up(0) == []
    assert has(state, 1)


def test_sessions_are_listed_without_their_secret(state: StoreState) -> None:
    engine = attach(state, credits=2, now=1.0)
    state.heartbeat(engine.id, [], 3.0)
    [row] = state.list_sessions(4.0)
    assert row.session == engine.id[:4].hex()
    assert (row.engine_id, row.client, row.pid, row.pool) == ("engine", "test", 1, "pool")
    assert (row.age_seconds, row.idle_seconds) == (3.0, 1.0)
    assert (row.held_slots, row.leases, row.state) == (2, 0, "attached")
    assert engine.id.hex() not in repr(engine.session)


def test_a_quota_below_an_extent_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"quotas\[small\]"):
        StoreState(settings(quotas={"small": EXTENT_BYTES - 1}))
    with pytest.raises(SettingsError, match="pool_quota"):
        StoreState(settings(pool_quota_bytes=1))


def test_results_are_uint32_and_uint8(state: StoreState) -> None:
    engine = attach(state, credits=1)
    match = engine.match(1)
    sealed = engine.seal(engine.first_grant, key(1))
    for array in (engine.first_grant.slots, engine.first_grant.generations, match.slots, match.generations):
        assert array.dtype == np.uint32
    assert sealed.status.dtype == np.uint8
