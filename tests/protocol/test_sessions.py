"""Attach: how a session begins, what keeps it alive, and what its end gives back."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvsieve.v1 import admin_pb2 as admin
from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.arena import Arena
from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.layout import ExtentLayout, SlotLayout
from kvsieve_store.protocol.limits import MAX_BATCH, MAX_CREDITS
from kvsieve_store.protocol.spec import Plane
from kvsieve_store.server.store import Store

from .conftest import EXTENT, SPEC, Engine, fails, snapshot, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

Connect = Callable[[str], Engine]
MakeStore = Callable[..., Awaitable[Store]]


async def sessions(engine: Engine) -> list[admin.SessionInfo]:
    return list((await engine.admin.ListSessions(admin.ListSessionsRequest())).sessions)


async def ended(engine: Engine) -> bool:
    return not await sessions(engine)


async def test_welcome_has_all_that_a_client_needs(engine: Engine, store: Store) -> None:
    welcome = engine.welcome
    layout = ExtentLayout.of(EXTENT, SlotLayout.of(SPEC).slot_bytes)
    assert len(welcome.session_id) == 16
    assert welcome.pool_id == SPEC.pool_id()
    assert welcome.arena.instance == store.core.instance
    assert [(s.path, s.bytes) for s in welcome.arena.segments] == [
        (str(store.core.arena.path / f"seg-{i:03}"), 4 * EXTENT) for i in range(2)
    ]
    assert (welcome.slot_bytes, welcome.slots_per_extent, welcome.slots_offset) == (
        layout.slot_bytes,
        layout.slots_per_extent,
        layout.slots_offset,
    )
    assert stat.S_IMODE(os.stat(welcome.lock_path).st_mode) == 0o600
    assert (welcome.session_timeout_ms, welcome.heartbeat_interval_ms) == (10_000, 2_500)
    assert len(welcome.credits.slots) == 4
    assert welcome.limits.max_batch == MAX_BATCH


async def test_the_end_of_the_stream_ends_the_session(engine: Engine, store: Store, connect: Connect) -> None:
    await engine.seal(1)
    await engine.match(1, lease_ms=60_000)
    await engine.stream.done_writing()
    assert await engine.stream.read() is grpc.aio.EOF
    assert await engine.stream.code() is grpc.StatusCode.OK
    assert await sessions(engine) == []
    assert not list(store.core.arena.path.glob("session-*"))
    pools = (await engine.admin.ListPools(admin.ListPoolsRequest())).pools
    assert [(p.sealed_blocks, p.writing_slots, p.leased_blocks) for p in pools] == [(1, 0, 0)]
    await fails(engine.match(1), grpc.StatusCode.NOT_FOUND, "session")
    again = connect(store.endpoints[0])
    await again.attach()
    assert len((await again.match(1)).slots) == 1


async def test_slots_wait_for_the_lock_file(engine: Engine, store: Store, connect: Connect) -> None:
    engine.lock()
    watcher = connect(store.endpoints[0])
    engine.stream.cancel()

    async def fencing() -> bool:
        return [s.state for s in await sessions(watcher)] == ["fencing"]

    await until(fencing)
    pools = (await watcher.admin.ListPools(admin.ListPoolsRequest())).pools
    assert pools[0].writing_slots == 4
    engine.unlock()
    await until(lambda: ended(watcher))
    pools = (await watcher.admin.ListPools(admin.ListPoolsRequest())).pools
    assert pools[0].writing_slots == 0


async def test_silence_ends_a_session_and_heartbeats_keep_one(
    make_store: MakeStore, connect: Connect
) -> None:
    store = await make_store(session_timeout=1.0)
    silent, alive = connect(store.endpoints[0]), connect(store.endpoints[0])
    await silent.attach(engine_id="silent")
    await alive.attach(engine_id="alive")

    async def beat() -> None:
        while True:
            await alive.send(pb.AttachRequest(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(0.1)

    beats = asyncio.create_task(beat())
    await fails(silent.receive(), UNAVAILABLE, "the session has ended: silent for 1 s")
    assert [s.engine_id for s in await sessions(alive)] == ["alive"]
    beats.cancel()


async def test_heartbeats_renew_leases(make_store: MakeStore, connect: Connect) -> None:
    engine = connect((await make_store()).endpoints[0])
    await engine.attach()
    await engine.seal(1, 2)
    kept = (await engine.match(1, lease_ms=2000)).lease_id
    await engine.match(2, lease_ms=100)
    beat = pb.AttachRequest(heartbeat=pb.Heartbeat(renew_leases=[kept, 12345]))

    async def one_left() -> bool:
        await engine.send(beat)
        return (await engine.admin.Status(admin.StatusRequest())).leases == 1

    await until(one_left)
    released = await engine.store.Release(pb.ReleaseRequest(session_id=engine.session_id, lease_ids=[kept]))
    assert released.leases == 1


async def test_a_session_short_of_credits_gets_them_when_slots_are_free(
    store: Store, connect: Connect
) -> None:
    rich, poor = connect(store.endpoints[0]), connect(store.endpoints[0])
    await rich.attach(credit_target=0)
    everything = pb.ReserveRequest(session_id=rich.session_id, count=MAX_BATCH)
    while (await rich.store.Reserve(everything)).credits.slots:
        pass
    await poor.attach()
    assert poor.credits == []
    await rich.close()
    poor.take((await poor.receive()).credits)
    assert len(poor.credits) == 4
    await poor.seal(1)


# Refusals


@pytest.mark.parametrize(
    ("hello", "code", "text"),
    [
        ({"protocol_version": 0}, grpc.StatusCode.FAILED_PRECONDITION, "protocol_version: 0 given"),
        ({"protocol_version": 2}, grpc.StatusCode.FAILED_PRECONDITION, "this store speaks 1 only"),
        ({"engine_id": ""}, INVALID, "engine_id"),
        ({"engine_id": "x" * 257}, INVALID, "engine_id"),
        ({"client": "x" * 257}, INVALID, "client"),
        ({"credit_target": MAX_CREDITS + 1}, INVALID, "credit_target: 16385 given"),
        ({"spec": pb.PoolSpec()}, INVALID, "pool.planes"),
        ({"spec": replace(SPEC, layout="other")}, grpc.StatusCode.FAILED_PRECONDITION, "layout: 'other'"),
        (
            {"spec": replace(SPEC, name="large", planes=(Plane("main", (EXTENT,)),))},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "--extent-size",
        ),
    ],
)
async def test_a_hello_that_is_refused(
    engine: Engine, store: Store, connect: Connect, hello: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    files = sorted(os.listdir(store.core.arena.path))
    before = await snapshot(engine)
    await fails(connect(store.endpoints[0]).attach(**hello), code, text)
    assert await snapshot(engine) == before
    assert sorted(os.listdir(store.core.arena.path)) == files


async def test_too_many_sessions(make_store: MakeStore, connect: Connect) -> None:
    store = await make_store(max_sessions=1)
    first, second = connect(store.endpoints[0]), connect(store.endpoints[0])
    await first.attach()
    await fails(second.attach(), grpc.StatusCode.RESOURCE_EXHAUSTED, "session")
    await first.close()
    await until(lambda: ended(second))
    second.stream = None
    await second.attach()


@pytest.mark.parametrize("message", [pb.AttachRequest(), pb.AttachRequest(heartbeat=pb.Heartbeat())])
async def test_hello_comes_first(store: Store, connect: Connect, message: pb.AttachRequest) -> None:
    engine = connect(store.endpoints[0])
    await engine.send(message)
    await fails(engine.receive(), INVALID, "hello: must be the first message")


async def test_a_stream_without_a_word(make_store: MakeStore, connect: Connect) -> None:
    store = await make_store(session_timeout=0.2)
    engine = connect(store.endpoints[0])
    engine.stream = engine.store.Attach()
    await fails(engine.receive(), INVALID, "hello: nothing received within 0.2 s")
    engine.stream = engine.store.Attach()
    await engine.stream.done_writing()
    await fails(engine.receive(), INVALID, "hello: must be the first message")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.AttachRequest(hello=pb.Hello()), "only heartbeats may follow hello"),
        (pb.AttachRequest(), "only heartbeats may follow hello"),
        (pb.AttachRequest(heartbeat=pb.Heartbeat(renew_leases=range(MAX_BATCH + 1))), "renew_leases"),
    ],
)
async def test_a_wrong_message_ends_the_session(engine: Engine, message: pb.AttachRequest, text: str) -> None:
    await engine.send(message)
    await fails(engine.receive(), INVALID, text)
    assert await sessions(engine) == []


async def test_no_session_before_the_arena_is_prefaulted(
    make_store: MakeStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    prefault = Arena.prefault

    def slow(arena: Arena, progress: Callable[[float], None], stop: threading.Event) -> None:
        progress(0.25)
        go_on.wait()
        prefault(arena, progress, stop)

    monkeypatch.setattr(Arena, "prefault", slow)
    store = await make_store(ready=False)
    engine = connect(store.endpoints[0])

    async def at_a_quarter() -> bool:
        status = await engine.admin.Status(admin.StatusRequest())
        return (status.state, status.prefaulted) == ("prefaulting", 0.25)

    try:
        await until(at_a_quarter)
        await fails(engine.attach(), UNAVAILABLE, "prefaults its arena: 25% done; try again")
    finally:
        go_on.set()
    await store.wait_until_ready()
    engine.stream = None
    await engine.attach()
    assert (await engine.admin.Status(admin.StatusRequest())).state == "ready"


async def test_a_store_whose_memory_runs_out_gives_up(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object) -> None:
        raise CapacityError("pool_size: memory ran out")

    monkeypatch.setattr(Arena, "prefault", no_memory)
    store = await make_store(ready=False)
    for waiting in (store.wait_until_ready(), store.wait_until_stop()):
        with pytest.raises(CapacityError, match="memory ran out"):
            await waiting


async def test_a_store_that_stops_says_so(make_store: MakeStore, connect: Connect, tmp_path) -> None:
    store = await make_store()
    engine = connect(store.endpoints[0])
    await engine.attach()
    await engine.seal(1)
    arena = store.core.arena.path
    await asyncio.gather(
        store.__aexit__(None, None, None), fails(engine.receive(), UNAVAILABLE, "the store has stopped")
    )
    assert not arena.exists()
    assert os.listdir(tmp_path / "run") == ["kvsieve.sock.lock"]


async def test_credits_that_an_engine_does_not_read_do_not_pile_up(
    make_store: MakeStore, connect: Connect
) -> None:
    """Whoever knows which slots come can give them back unread, for more to come."""
    store = await make_store(pool_size=64 * EXTENT)
    engine = connect(store.endpoints[0])
    await engine.attach(replace(SPEC, planes=(Plane("main", (4096,)),)), credit_target=MAX_CREDITS)
    (pool,), (stream,) = store.core.state._pools.values(), store.core._streams.values()
    for _ in range(300):
        slots = pool.held_by(1)
        await engine.store.Release(
            pb.ReleaseRequest(
                session_id=engine.session_id, slots=slots, generations=pool.table.generation[slots]
            )
        )
        store.core.tick()
    assert stream._outbox.qsize() <= 1
    while pool.writing == 0:
        engine.take((await engine.receive()).credits)
        store.core.tick()
