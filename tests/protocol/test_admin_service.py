"""kvsieve.v1.Admin: what it shows, what it changes, what it refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import grpc
import pytest

from kvsieve.v1 import admin_pb2 as admin
from kvsieve.v1 import store_pb2 as pb
from kvsieve_store import __version__
from kvsieve_store.server.store import Store

from .conftest import EXTENT, EXTENTS, ROOT, SLOTS_PER_EXTENT, SPEC, Engine, fails, key, keys, snapshot

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


async def test_status(engine: Engine, store: Store) -> None:
    await engine.seal(1, 2)
    await engine.match(1, lease_ms=60_000)
    status = await engine.admin.Status(admin.StatusRequest())
    assert status.uptime_seconds > 0
    assert status.rss_bytes > 0
    status.ClearField("uptime_seconds")
    status.ClearField("rss_bytes")
    assert status == admin.StatusResponse(
        version=__version__,
        instance=engine.welcome.arena.instance,
        state="ready",
        prefaulted=1.0,
        arena_bytes=EXTENTS * EXTENT,
        owned_bytes=EXTENT,
        sealed_bytes=2 * engine.welcome.slot_bytes,
        pools=1,
        sessions=1,
        sealed_blocks=2,
        leases=1,
        listen=store.endpoints,
        arena_dir=str(store.core.arena.path),
        directory="local",
    )


async def test_sessions_and_pools(engine: Engine) -> None:
    await engine.seal(1)
    await engine.match(1, 2, lease_ms=60_000)
    (session,) = (await engine.admin.ListSessions(admin.ListSessionsRequest())).sessions
    assert session.session == engine.session_id[:4].hex()
    assert (session.engine_id, session.pid, session.pool) == ("engine", os.getpid(), "pool")
    assert (session.held_slots, session.leases, session.state) == (4, 1, "attached")
    (pool,) = (await engine.admin.ListPools(admin.ListPoolsRequest())).pools
    assert (pool.pool_id, pool.name, pool.model) == (SPEC.pool_id().hex(), "pool", "model")
    assert (pool.owned_bytes, pool.quota_bytes) == (EXTENT, EXTENTS * EXTENT)
    assert (pool.writing_slots, pool.sealed_blocks, pool.leased_blocks) == (4, 1, 1)
    assert pool.free_slots == SLOTS_PER_EXTENT - 5
    assert pool.matched_blocks == 1


async def test_blocks_come_in_pages(engine: Engine) -> None:
    await engine.seal(1, 2)
    await engine.seal(3)
    seen: list[admin.BlockInfo] = []
    token = ""
    while True:
        request = admin.ListBlocksRequest(pool=SPEC.pool_id().hex()[:8], page_size=2, page_token=token)
        page = await engine.admin.ListBlocks(request)
        assert len(page.blocks) <= 2
        seen += page.blocks
        token = page.next_page_token
        if not token:
            break
    assert {block.key: (block.parent, block.children) for block in seen} == {
        key(1): (b"", 1),
        key(2): (key(1), 0),
        key(3): (b"", 0),
    }


async def test_evict_pin_unpin_clear(engine: Engine) -> None:
    await engine.seal(1, 2)
    await engine.seal(3)
    pinned = await engine.admin.Pin(admin.PinRequest(pool="pool", keys=keys(2, 9)))
    assert (pinned.pinned, pinned.unknown) == (1, 1)
    evicted = await engine.admin.Evict(admin.EvictRequest(pool="pool", keys=keys(1, 3, 9)))
    assert (evicted.evicted, evicted.skipped, evicted.unknown) == (1, 1, 1)
    unpinned = await engine.admin.Unpin(admin.UnpinRequest(pool="pool"))
    assert (unpinned.unpinned, unpinned.unknown) == (1, 0)
    evicted = await engine.admin.Evict(admin.EvictRequest(pool="pool", count=1))
    assert evicted.evicted == 1
    assert len((await engine.match(1, 2, lease_ms=60_000)).slots) == 1
    cleared = await engine.admin.Clear(admin.ClearRequest())
    assert (cleared.dropped, cleared.skipped) == (0, 1)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ListBlocks", admin.ListBlocksRequest(pool="none")),
        ("ListBlocks", admin.ListBlocksRequest(pool=SPEC.pool_id().hex()[:7])),
        ("Evict", admin.EvictRequest(pool="none", count=1)),
        ("Pin", admin.PinRequest(pool="none", keys=key(1))),
        ("Unpin", admin.UnpinRequest(pool="none")),
        ("Clear", admin.ClearRequest(pool="none")),
    ],
)
async def test_an_unknown_pool(engine: Engine, method: str, request_: object) -> None:
    before = await snapshot(engine)
    await fails(getattr(engine.admin, method)(request_), NOT_FOUND, "pool: ")
    assert await snapshot(engine) == before


@pytest.mark.parametrize(
    ("method", "request_", "text"),
    [
        ("ListBlocks", admin.ListBlocksRequest(pool="pool", page_size=1001), "page_size: 1001 given"),
        ("ListBlocks", admin.ListBlocksRequest(pool="pool", page_token="x"), "page_token"),
        ("Evict", admin.EvictRequest(pool="pool"), "keys, count: give one of them"),
        ("Evict", admin.EvictRequest(pool="pool", keys=key(1), count=1), "keys, count: give one of them"),
        ("Evict", admin.EvictRequest(pool="pool", keys=b"x"), "keys: 1 bytes given"),
        ("Evict", admin.EvictRequest(pool="pool", keys=bytes(32 * 4097)), "keys: 4097 keys given"),
        ("Pin", admin.PinRequest(pool="pool"), "keys: 0 keys given"),
        ("Unpin", admin.UnpinRequest(pool="pool", keys=b"x"), "keys: 1 bytes given"),
        ("Drain", admin.DrainRequest(timeout_ms=600_001), "timeout_ms: 600001 given, at most 600000"),
    ],
)
async def test_bad_arguments(engine: Engine, method: str, request_: object, text: str) -> None:
    await engine.seal(1)
    before = await snapshot(engine)
    await fails(getattr(engine.admin, method)(request_), INVALID, text)
    assert await snapshot(engine) == before


async def test_drain_waits_for_leases_and_refuses_new_work(
    engine: Engine, store: Store, connect: Callable[[str], Engine]
) -> None:
    await engine.seal(1)
    lease = (await engine.match(1, lease_ms=60_000)).lease_id
    drain = asyncio.create_task(_drain(engine, 60_000))
    told = await engine.receive()
    assert told.draining.deadline_ms == 60_000
    unavailable = grpc.StatusCode.UNAVAILABLE
    reserve = pb.ReserveRequest(session_id=engine.session_id, count=1)
    await fails(engine.match(1), unavailable, "draining")
    await fails(engine.store.Reserve(reserve), unavailable, "draining")
    await fails(connect(store.endpoints[0]).attach(), unavailable, "draining")
    sealed = await engine.store.Seal(
        pb.SealRequest(session_id=engine.session_id, keys=key(2), parents=ROOT, slots=[1], generations=[1])
    )
    assert list(sealed.status) == [pb.SEAL_STATUS_SEALED]
    assert len(sealed.credits.slots) == 0
    assert (await engine.admin.Status(admin.StatusRequest())).state == "draining"
    assert not drain.done()
    await engine.store.Release(pb.ReleaseRequest(session_id=engine.session_id, lease_ids=[lease]))
    assert (await drain).leases_left == 0
    await store.wait_until_stop()


async def test_drain_gives_up_when_the_time_is_over(engine: Engine, store: Store) -> None:
    await engine.seal(1)
    await engine.match(1, lease_ms=60_000)
    assert (await _drain(engine, 100)).leases_left == 1
    await store.wait_until_stop()


async def test_a_drain_goes_on_without_its_caller(engine: Engine, store: Store) -> None:
    await engine.seal(1)
    lease = (await engine.match(1, lease_ms=60_000)).lease_id
    call = engine.admin.Drain(admin.DrainRequest(timeout_ms=60_000))
    await engine.receive()
    call.cancel()
    second = asyncio.create_task(_drain(engine, 60_000))
    await engine.store.Release(pb.ReleaseRequest(session_id=engine.session_id, lease_ids=[lease]))
    assert (await second).leases_left == 0
    await store.wait_until_stop()


async def _drain(engine: Engine, timeout_ms: int) -> admin.DrainResponse:
    return await engine.admin.Drain(admin.DrainRequest(timeout_ms=timeout_ms))
