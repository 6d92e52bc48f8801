"""kvsieve.v1.Store: each call as it should go, and each refusal, after which nothing has changed."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.protocol.layout import ExtentLayout
from kvsieve_store.protocol.limits import MAX_BATCH, MAX_LEASE_MS, MAX_MATCH_KEYS
from kvsieve_store.server.store import Store

from .conftest import EXTENTS, ROOT, SLOTS_PER_EXTENT, SPEC, Engine, fails, key, keys, snapshot

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION

Connect = Callable[[str], Engine]

CALLS = {
    "Match": lambda session: pb.MatchRequest(session_id=session, keys=key(1)),
    "Reserve": lambda session: pb.ReserveRequest(session_id=session, count=1),
    "Seal": lambda session: pb.SealRequest(
        session_id=session, keys=key(1), parents=ROOT, slots=[0], generations=[1]
    ),
    "Release": lambda session: pb.ReleaseRequest(session_id=session, lease_ids=[1]),
}


def generation_in_header(welcome: pb.Welcome, slot: int) -> int:
    layout = ExtentLayout(
        welcome.arena.extent_bytes, welcome.slot_bytes, welcome.slots_per_extent, welcome.slots_offset
    )
    at = layout.header_address(slot)
    for segment in welcome.arena.segments:
        if at < segment.bytes:
            return int(np.memmap(segment.path, np.uint64, "r", offset=at, shape=(1,))[0])
        at -= segment.bytes
    raise AssertionError(f"slot {slot} is beyond the arena")


async def test_seal_match_release(engine: Engine) -> None:
    first = engine.credits[:3]
    assert await engine.seal(1, 2, 3) == [pb.SEAL_STATUS_SEALED] * 3
    assert len(engine.credits) == 4
    found = await engine.match(1, 2, 3, 4, lease_ms=1000)
    assert list(zip(found.slots, found.generations, strict=True)) == first
    assert found.lease_id > 0
    released = await engine.store.Release(
        pb.ReleaseRequest(session_id=engine.session_id, lease_ids=[found.lease_id, 999])
    )
    assert released.leases == 1


async def test_a_match_without_a_lease_and_a_miss(engine: Engine) -> None:
    await engine.seal(1)
    assert (await engine.match(1)).lease_id == 0
    assert await engine.match(2, 1, lease_ms=1000) == pb.MatchResponse()


async def test_blocks_of_one_engine_are_found_by_another(
    engine: Engine, store: Store, connect: Connect
) -> None:
    await engine.seal(1, 2)
    other = connect(store.endpoints[0])
    await other.attach()
    assert len((await other.match(1, 2)).slots) == 2
    third = connect(store.endpoints[0])
    await third.attach(pb.PoolSpec.FromString(SPEC.to_proto().SerializeToString().replace(b"pool", b"loop")))
    assert len((await third.match(1, 2)).slots) == 0


async def test_a_key_that_is_there_is_a_duplicate_and_its_slot_is_free_again(engine: Engine) -> None:
    await engine.seal(1)
    before = (await engine.match(1)).slots[:]
    assert await engine.seal(1, 2) == [pb.SEAL_STATUS_DUPLICATE, pb.SEAL_STATUS_SEALED]
    assert (await engine.match(1)).slots[:] == before
    assert len(engine.credits) == 4


async def test_a_seal_with_a_lease_leases_what_it_sealed_and_leaves_duplicates(engine: Engine) -> None:
    assert (await engine.seal_and_lease(1, lease_ms=0)).lease_id == 0
    kept, sealed = engine.credits[:2]
    answer = await engine.seal_and_lease(1, 2, lease_ms=60_000)
    assert answer.status == [pb.SEAL_STATUS_DUPLICATE, pb.SEAL_STATUS_SEALED]
    assert answer.lease_id > 0
    assert len(answer.credits.slots) == 1  # four are held: the duplicate is one of them
    assert "leases: 1" in await snapshot(engine)
    found = await engine.match(2)
    assert (found.slots[0], found.generations[0]) == sealed
    back = await engine.store.Release(
        pb.ReleaseRequest(
            session_id=engine.session_id, lease_ids=[answer.lease_id], slots=[kept[0]], generations=[kept[1]]
        )
    )
    assert (back.leases, back.slots) == (1, 1)
    only = await engine.seal_and_lease(2, lease_ms=60_000)
    assert (only.status, only.lease_id) == ([pb.SEAL_STATUS_DUPLICATE], 0)


async def test_a_seal_adds_to_a_lease(engine: Engine) -> None:
    await engine.seal(1)
    lease = (await engine.match(1, lease_ms=60_000)).lease_id
    assert (await engine.seal_and_lease(2, 3, lease_ms=60_000, lease_id=lease)).lease_id == lease
    assert "leases: 1" in await snapshot(engine)
    other = (await engine.seal_and_lease(4, lease_ms=60_000, lease_id=lease + 1)).lease_id
    assert other not in (0, lease)
    before = await snapshot(engine)
    await fails(
        engine.seal_and_lease(5, lease_ms=0, lease_id=lease), INVALID, f"lease_id: {lease} given without"
    )
    assert await snapshot(engine) == before


async def test_reserve_grants_what_is_there(engine: Engine) -> None:
    granted = await engine.store.Reserve(pb.ReserveRequest(session_id=engine.session_id, count=3))
    assert len(granted.credits.slots) == 3
    engine.take(granted.credits)
    rest = await engine.store.Reserve(pb.ReserveRequest(session_id=engine.session_id, count=MAX_BATCH))
    engine.take(rest.credits)
    assert len(set(engine.credits)) == SLOTS_PER_EXTENT * EXTENTS
    none = await engine.store.Reserve(pb.ReserveRequest(session_id=engine.session_id, count=1))
    assert len(none.credits.slots) == 0


async def test_unused_slots_can_be_given_back(engine: Engine) -> None:
    slots, generations = zip(*engine.credits, strict=True)
    released = await engine.store.Release(
        pb.ReleaseRequest(session_id=engine.session_id, slots=slots, generations=generations)
    )
    assert released.slots == 4
    assert "held_slots" not in await snapshot(engine)


async def test_the_header_has_the_generation_before_the_grant_arrives(engine: Engine) -> None:
    granted = await engine.store.Reserve(
        pb.ReserveRequest(session_id=engine.session_id, count=SLOTS_PER_EXTENT * EXTENTS)
    )
    engine.take(granted.credits)
    for slot, generation in engine.credits:
        assert generation == 1
        assert generation_in_header(engine.welcome, slot) == 1
    slot, generation = engine.credits.pop()
    await engine.store.Release(
        pb.ReleaseRequest(session_id=engine.session_id, slots=[slot], generations=[generation])
    )
    again = await engine.store.Reserve(pb.ReserveRequest(session_id=engine.session_id, count=1))
    assert (again.credits.slots[:], again.credits.generations[:]) == ([slot], [2])
    assert generation_in_header(engine.welcome, slot) == 2


# Refusals


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("session", [b"", bytes(16), b"x" * 16, b"x" * 40])
async def test_an_unknown_session(engine: Engine, method: str, session: bytes) -> None:
    before = await snapshot(engine)
    await fails(getattr(engine.store, method)(CALLS[method](session)), grpc.StatusCode.NOT_FOUND, "session")
    assert await snapshot(engine) == before


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"keys": b""}, "keys: 0 keys given, 1 to 32768 allowed"),
        ({"keys": b"x" * 33}, "keys: 33 bytes given, a multiple of 32 required"),
        ({"keys": bytes(32 * (MAX_MATCH_KEYS + 1))}, "keys: 32769 keys given, 1 to 32768 allowed"),
        ({"keys": key(1), "lease_ms": MAX_LEASE_MS + 1}, "lease_ms: 600001 given, 0 to 600000 allowed"),
    ],
)
async def test_match_refuses(engine: Engine, fields: dict, text: str) -> None:
    await engine.seal(1)
    before = await snapshot(engine)
    await fails(engine.store.Match(pb.MatchRequest(session_id=engine.session_id, **fields)), INVALID, text)
    assert await snapshot(engine) == before


@pytest.mark.parametrize("count", [0, MAX_BATCH + 1, 2**32 - 1])
async def test_reserve_refuses(engine: Engine, count: int) -> None:
    before = await snapshot(engine)
    request = pb.ReserveRequest(session_id=engine.session_id, count=count)
    await fails(engine.store.Reserve(request), INVALID, f"count: {count} given, 1 to 4096 allowed")
    assert await snapshot(engine) == before


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"keys": b"", "parents": b""}, INVALID, "keys: 0 keys given"),
        ({"keys": b"x" * 65}, INVALID, "keys: 65 bytes given, a multiple of 32 required"),
        ({"keys": bytes(64)}, INVALID, "keys[0]: all zero"),
        ({"keys": keys(*range(1, MAX_BATCH + 2))}, INVALID, "keys: 4097 keys given, 1 to 4096 allowed"),
        ({"parents": ROOT}, INVALID, "parents: 1 entries given, 2 required"),
        ({"parents": b"x"}, INVALID, "parents: 1 bytes given"),
        ({"slots": [0]}, INVALID, "slots: 1 entries given, 2 required"),
        ({"generations": [1, 1, 1]}, INVALID, "generations: 3 entries given, 2 required"),
        ({"lease_ms": MAX_LEASE_MS + 1}, INVALID, "lease_ms: 600001 given, 0 to 600000 allowed"),
        ({"generations": [1, 2]}, PRECONDITION, "generations[1]: slot 1 is held under generation 1, 2 given"),
        ({"slots": [0, 0]}, PRECONDITION, "slots[1]"),
        ({"slots": [0, 5]}, PRECONDITION, "slots[1]"),
        ({"slots": [0, SLOTS_PER_EXTENT * EXTENTS]}, PRECONDITION, "slots[1]"),
        ({"slots": [2**32 - 1, 0]}, PRECONDITION, "slots[0]"),
    ],
)
async def test_seal_refuses_all_or_nothing(
    engine: Engine, change: dict, code: grpc.StatusCode, text: str
) -> None:
    before = await snapshot(engine)
    good = {"keys": keys(1, 2), "parents": ROOT + key(1), "slots": [0, 1], "generations": [1, 1]}
    request = pb.SealRequest(session_id=engine.session_id, **{**good, **change})
    await fails(engine.store.Seal(request), code, text)
    assert await snapshot(engine) == before
    await engine.store.Seal(pb.SealRequest(session_id=engine.session_id, **good))


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"keys": keys(1)[:31]}, INVALID, "keys: 31 bytes"),
        ({"keys": ROOT * 2}, INVALID, "keys[0]: all zero"),
        ({"slots": [0]}, INVALID, "slots: 1 entries"),
        ({"generations": [1]}, INVALID, "generations: 1 entries"),
        ({"slots": [0, 99]}, grpc.StatusCode.FAILED_PRECONDITION, "slots[1]: slot 99"),
        ({"generations": [1, 2]}, grpc.StatusCode.FAILED_PRECONDITION, "generations[1]"),
        ({"session_id": bytes(16)}, grpc.StatusCode.NOT_FOUND, "session_id"),
    ],
)
async def test_announce_refuses_all_or_nothing(
    engine: Engine, change: dict, code: grpc.StatusCode, text: str
) -> None:
    good = {"session_id": engine.session_id, "keys": keys(1, 2), "slots": [0, 1], "generations": [1, 1]}
    before = await snapshot(engine)
    await fails(engine.store.Announce(pb.AnnounceRequest(**{**good, **change})), code, text)
    assert await snapshot(engine) == before
    await engine.store.Announce(pb.AnnounceRequest(**good))
    assert not (await engine.match(1, 2)).slots
    assert await engine.seal(1, 2) == [pb.SEAL_STATUS_SEALED] * 2


async def test_slots_of_another_session_are_out_of_reach(
    engine: Engine, store: Store, connect: Connect
) -> None:
    other = connect(store.endpoints[0])
    await other.attach()
    slot, generation = engine.credits[0]
    before = await snapshot(engine)
    seal = pb.SealRequest(
        session_id=other.session_id, keys=key(1), parents=ROOT, slots=[slot], generations=[generation]
    )
    await fails(other.store.Seal(seal), PRECONDITION, f"slots[0]: slot {slot} is not held by this session")
    release = pb.ReleaseRequest(session_id=other.session_id, slots=[slot], generations=[generation])
    await fails(other.store.Release(release), PRECONDITION, "slots[0]")
    assert await snapshot(engine) == before


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"slots": [0], "generations": []}, INVALID, "generations: 0 entries given, 1 required"),
        ({"slots": [1], "generations": [7]}, PRECONDITION, "generations[0]"),
        ({"slots": [1, 9], "generations": [1, 1]}, PRECONDITION, "slots[1]"),
        ({"lease_ids": range(MAX_BATCH + 1)}, INVALID, "lease_ids (count): 4097 given, 0 to 4096 allowed"),
        (
            {"slots": range(MAX_BATCH + 1), "generations": range(MAX_BATCH + 1)},
            INVALID,
            "slots (count): 4097 given",
        ),
    ],
)
async def test_release_refuses_all_or_nothing(
    engine: Engine, fields: dict, code: grpc.StatusCode, text: str
) -> None:
    await engine.seal(1)
    lease = (await engine.match(1, lease_ms=60_000)).lease_id
    before = await snapshot(engine)
    request = pb.ReleaseRequest(session_id=engine.session_id, **{"lease_ids": [lease], **fields})
    await fails(engine.store.Release(request), code, text)
    assert await snapshot(engine) == before


async def test_a_lease_of_another_session_is_skipped(engine: Engine, store: Store, connect: Connect) -> None:
    await engine.seal(1)
    lease = (await engine.match(1, lease_ms=60_000)).lease_id
    other = connect(store.endpoints[0])
    await other.attach()
    before = await snapshot(engine)
    released = await other.store.Release(pb.ReleaseRequest(session_id=other.session_id, lease_ids=[lease]))
    assert released.leases == 0
    assert await snapshot(engine) == before


async def test_a_bug_costs_one_call_and_is_logged(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*args: object) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(store.core.state, "match", bug)
        await fails(
            engine.match(1), grpc.StatusCode.INTERNAL, "Match failed inside the store; its log says why"
        )
    assert "secret detail" in caplog.text
    assert await engine.match(1) == pb.MatchResponse()
