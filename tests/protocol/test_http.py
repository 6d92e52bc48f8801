"""HTTP: probes, metrics, status."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import aiohttp
import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsieve.v1 import admin_pb2 as admin
from kvsieve_store import __version__
from kvsieve_store.arena import Arena
from kvsieve_store.server import http as server_http
from kvsieve_store.server.store import Store

from .conftest import EXTENT, SLOTS_PER_EXTENT, Engine, fails, until

MakeStore = Callable[..., Awaitable[Store]]


async def get(store: Store, path: str) -> tuple[int, str]:
    assert store.http_address is not None
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{store.http_address.host_port}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def samples(store: Store) -> dict[tuple[str, ...], float]:
    """(name, *label values in the order of the labels' names) -> value of every sample."""
    status, text = await get(store, "/metrics")
    assert status == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_ready_only_after_the_prefault(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Arena, "prefault", lambda arena, progress, stop: go_on.wait())
    store = await make_store(ready=False)
    try:
        assert await get(store, "/healthz") == (200, "ok\n")
        assert await get(store, "/readyz") == (503, "the store prefaults its arena: 0% done; try again\n")
        assert (await samples(store))[("kvsieve_ready",)] == 0
    finally:
        go_on.set()
    await store.wait_until_ready()
    assert await get(store, "/readyz") == (200, "ready\n")


async def test_not_ready_while_draining(engine: Engine, store: Store) -> None:
    await engine.seal(1)
    await engine.match(1, lease_ms=60_000)
    drain = engine.admin.Drain(admin.DrainRequest(timeout_ms=60_000))

    async def not_ready() -> bool:
        return await get(store, "/readyz") == (503, "the store is draining: it is about to stop\n")

    await until(not_ready)
    assert (await get(store, "/healthz"))[0] == 200
    drain.cancel()


async def test_a_store_without_prefault_is_ready_at_once(make_store: MakeStore) -> None:
    store = await make_store(prefault=False)
    assert (await get(store, "/readyz"))[0] == 200


async def test_http_can_be_off(make_store: MakeStore) -> None:
    assert (await make_store(http="")).http_address is None


async def test_status(engine: Engine, store: Store) -> None:
    await engine.seal(1)
    assert store.http_address is not None
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{store.http_address.host_port}/status") as answer,
    ):
        page = await answer.json()
    assert (page["version"], page["state"], page["sealed_blocks"]) == (__version__, "ready", 1)
    assert page["instance"] == store.core.instance.hex()
    assert page["listen"] == store.endpoints
    assert [(pool["name"], pool["writing_slots"]) for pool in page["pools"]] == [("pool", 4)]
    assert engine.session_id.hex() not in str(page)


async def test_metrics(engine: Engine, store: Store) -> None:
    await engine.seal(1, 2)
    await engine.seal(1)
    await engine.match(1, 2, 3, lease_ms=60_000)
    await fails(engine.match(), grpc.StatusCode.INVALID_ARGUMENT, "keys")
    await engine.admin.Pin(admin.PinRequest(pool="pool", keys=(1).to_bytes(32, "big")))
    slot_bytes = engine.welcome.slot_bytes
    found = await samples(store)
    for name, value in {
        ("kvsieve_build_info", __version__): 1,
        ("kvsieve_ready",): 1,
        ("kvsieve_arena_bytes",): 8 * EXTENT,
        ("kvsieve_arena_owned_bytes",): EXTENT,
        ("kvsieve_arena_sealed_bytes",): 2 * slot_bytes,
        ("kvsieve_sessions",): 1,
        ("kvsieve_fencing_sessions",): 0,
        ("kvsieve_leases",): 1,
        ("kvsieve_pool_owned_bytes", "pool"): EXTENT,
        ("kvsieve_pool_quota_bytes", "pool"): 8 * EXTENT,
        ("kvsieve_pool_sealed_bytes", "pool"): 2 * slot_bytes,
        ("kvsieve_pool_sessions", "pool"): 1,
        ("kvsieve_pool_blocks", "pool", "free"): SLOTS_PER_EXTENT - 6,
        ("kvsieve_pool_blocks", "pool", "writing"): 4,
        ("kvsieve_pool_blocks", "pool", "sealed"): 2,
        ("kvsieve_pool_blocks", "pool", "leased"): 2,
        ("kvsieve_pool_blocks", "pool", "pinned"): 1,
        ("kvsieve_matched_blocks_total", "pool"): 2,
        ("kvsieve_missed_blocks_total", "pool"): 1,
        ("kvsieve_sealed_blocks_total", "pool"): 2,
        ("kvsieve_duplicate_blocks_total", "pool"): 1,
        ("kvsieve_granted_slots_total", "pool"): 7,
        ("kvsieve_rpc_requests_total", "Attach"): 1,
        ("kvsieve_rpc_requests_total", "Match"): 2,
        ("kvsieve_rpc_failures_total", "INVALID_ARGUMENT", "Match"): 1,
        ("kvsieve_rpc_duration_seconds_count", "Match"): 2,
    }.items():
        assert found.get(name) == value, name
    assert ("process_resident_memory_bytes",) in found


async def test_every_metric_is_documented(engine: Engine, store: Store, pytestconfig: pytest.Config) -> None:
    await engine.seal(1)
    page = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()
    names = {name[0] for name in await samples(store) if name[0].startswith("kvsieve_")}
    for suffix in ("_bucket", "_count", "_sum", "_created"):
        names = {name.removesuffix(suffix) for name in names}
    counters = {name.removesuffix("_total") for name in names if name.endswith("_total")}
    assert sorted(name for name in names - counters if f"`{name}`" not in page) == []


# Few connections, and short ones


async def open_http(store: Store) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert store.http_address is not None
    return await asyncio.open_connection(store.http_address.host, store.http_address.port)


async def closed(reader: asyncio.StreamReader) -> bool:
    """Reads to the end; whether the store had nothing to say."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_connections_beyond_the_limit_are_closed_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_http, "_MAX_CONNECTIONS", 3)
    held = [await open_http(store) for _ in range(3)]
    reader, writer = await open_http(store)
    assert await closed(reader)
    writer.close()
    for _, held_writer in held:
        held_writer.close()

    async def answers() -> bool:
        try:
            return (await get(store, "/healthz"))[0] == 200
        except aiohttp.ClientError:
            return False

    await until(answers)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: store\r\n"])
async def test_a_connection_that_sends_no_complete_request_is_closed(
    store: Store, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server_http, "_CONNECTION_SECONDS", 0.2)
    reader, writer = await open_http(store)
    writer.write(sent)
    assert await closed(reader)
    writer.close()


@pytest.mark.parametrize("path", ["/healthz", "/nothing"])
async def test_one_request_a_connection(store: Store, path: str) -> None:
    reader, writer = await open_http(store)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: store\r\n\r\n".encode())
    assert b"connection: close" in (await reader.read()).lower()
    writer.close()


async def test_not_ready_once_the_arena_is_gone(store: Store, engine: Engine) -> None:
    arena = store.core.arena.path
    away = arena.rename(arena.with_name("away"))
    status, reason = await get(store, "/readyz")
    assert (status, reason) == (
        503,
        f"arena: {arena} is gone, and with it the way to attach; restart the store\n",
    )
    refused = Engine(store.endpoints[0])
    await fails(refused.attach(), grpc.StatusCode.UNAVAILABLE, f"{arena} is gone")
    await refused.close()
    away.rename(arena)
    assert (await get(store, "/readyz"))[0] == 200
