"""Stores and engines as processes of their own: what is left when one of them dies, stops or stands still."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from kvsieve.v1 import admin_pb2 as admin
from kvsieve_store.addresses import UnixAddress, parse_address

from .conftest import EXTENT, EXTENTS, Engine, StoreProcess, fails, until

Spawn = Callable[..., StoreProcess]
Connect = Callable[[str], Engine]

ENGINE = """
import asyncio, sys
from tests.protocol.conftest import Engine

async def main():
    engine = Engine(sys.argv[1])
    await engine.attach(engine_id="victim", credit_target=8)
    engine.lock()
    await engine.seal(1, 2)
    await engine.match(1, 2, lease_ms=600_000)
    print("attached", flush=True)
    while (await engine.receive()).WhichOneof("message"):
        pass

asyncio.run(main())
"""


@pytest.fixture
def spawn_engine(pytestconfig: pytest.Config) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """spawn_engine(endpoint) -> a process with 8 credits, 2 sealed blocks, a lease and its lock."""
    engines: list[subprocess.Popen[str]] = []

    def start(endpoint: str) -> subprocess.Popen[str]:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, endpoint],
            stdout=subprocess.PIPE,
            text=True,
            cwd=pytestconfig.rootpath,
        )
        engines.append(engine)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "attached\n"
        return engine

    yield start
    for engine in engines:
        engine.kill()
        engine.wait()
        assert engine.stdout is not None
        engine.stdout.close()


def arenas(mount: Path) -> list[Path]:
    """Directories of arenas, those under construction included."""
    return list(mount.glob("*kvsieve-*"))


async def the_pool(engine: Engine) -> admin.PoolInfo:
    (pool,) = (await engine.admin.ListPools(admin.ListPoolsRequest())).pools
    return pool


async def session_states(engine: Engine) -> list[str]:
    return [s.state for s in (await engine.admin.ListSessions(admin.ListSessionsRequest())).sessions]


async def test_a_killed_engine_gives_its_slots_back_and_leaves_its_blocks(
    spawn: Spawn, spawn_engine: Callable[[str], subprocess.Popen[str]], connect: Connect
) -> None:
    store = spawn()
    await store.has_logged("ready")
    victim = await asyncio.to_thread(spawn_engine, store.endpoint)
    watcher = connect(store.endpoint)
    assert (await the_pool(watcher)).writing_slots == 8
    assert (await the_pool(watcher)).leased_blocks == 2
    victim.send_signal(signal.SIGKILL)

    async def gone() -> bool:
        return await session_states(watcher) == []

    await until(gone)
    pool = await the_pool(watcher)
    assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 2)
    await watcher.attach()
    assert len((await watcher.match(1, 2)).slots) == 2


async def test_a_stopped_engine_keeps_its_slots_out_of_reach_until_it_is_dead(
    spawn: Spawn, spawn_engine: Callable[[str], subprocess.Popen[str]], connect: Connect
) -> None:
    store = spawn(session_timeout=0.5)
    await store.has_logged("ready")
    victim = await asyncio.to_thread(spawn_engine, store.endpoint)
    victim.send_signal(signal.SIGSTOP)
    watcher = connect(store.endpoint)

    async def fencing() -> bool:
        return await session_states(watcher) == ["fencing"]

    await until(fencing)
    await store.has_logged("silent for 0.5 s")
    pool = await the_pool(watcher)
    assert (pool.sessions, pool.writing_slots, pool.leased_blocks) == (0, 8, 2)
    victim.send_signal(signal.SIGKILL)

    async def fenced() -> bool:
        return await session_states(watcher) == []

    await until(fenced)
    pool = await the_pool(watcher)
    assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 2)


async def test_the_second_store_on_a_socket_is_refused_and_the_first_goes_on(
    spawn: Spawn, connect: Connect
) -> None:
    first = spawn()
    await first.has_logged("ready")
    engine = connect(first.endpoint)
    await engine.attach()
    await engine.seal(1)
    second = spawn()
    assert await second.wait() == 1
    refusal = second.log.read_text()
    assert f"another store (process {first.process.pid}) serves this socket" in refusal
    assert "Traceback" not in refusal
    assert len((await engine.match(1)).slots) == 1
    again = connect(first.endpoint)
    await again.attach()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_store_cleanly(
    spawn: Spawn, connect: Connect, tmp_path: Path, number: signal.Signals
) -> None:
    store = spawn(shm_dir=str(tmp_path))
    await store.has_logged("ready")
    engine = connect(store.endpoint)
    await engine.attach()
    engine.lock()
    assert len(arenas(tmp_path)) == 1
    store.process.send_signal(number)
    await fails(engine.receive(), grpc.StatusCode.UNAVAILABLE, "the store has stopped")
    assert await store.wait() == 0
    assert arenas(tmp_path) == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["kvsieve.sock.lock"]
    assert "Traceback" not in store.log.read_text()


async def test_a_drain_ends_the_process(spawn: Spawn, connect: Connect) -> None:
    store = spawn()
    await store.has_logged("ready")
    engine = connect(store.endpoint)
    await engine.attach()
    await engine.seal(1)
    await engine.match(1, lease_ms=60_000)
    drained = await engine.admin.Drain(admin.DrainRequest(timeout_ms=100))
    assert drained.leases_left == 1
    assert await store.wait() == 0


async def test_a_killed_store_is_replaced_and_its_memory_removed(
    spawn: Spawn, connect: Connect, tmp_path: Path
) -> None:
    first = spawn(shm_dir=str(tmp_path))
    await first.has_logged("ready")
    engine = connect(first.endpoint)
    instance = (await engine.attach()).arena.instance
    (dead,) = arenas(tmp_path)
    first.process.kill()
    await first.wait()
    assert dead.exists()
    second = spawn(shm_dir=str(tmp_path))
    await second.has_logged("ready")
    (alive,) = arenas(tmp_path)
    assert alive != dead
    again = connect(second.endpoint)
    assert (await again.attach()).arena.instance != instance


async def test_an_arena_that_does_not_fit_is_refused_before_anything_is_made(
    spawn: Spawn, tmp_path: Path
) -> None:
    store = spawn(shm_dir=str(tmp_path), pool_size="1000TiB", extent_size="1GiB", segment_size="1GiB")
    assert await store.wait() == 1
    refusal = store.log.read_text()
    assert "pool_size: 1000 TiB needed" in refusal
    assert "lower --pool-size" in refusal
    assert "Traceback" not in refusal
    assert arenas(tmp_path) == []


async def test_an_address_that_is_taken(spawn: Spawn, tmp_path: Path) -> None:
    first = spawn(http="")
    await first.has_logged("ready")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    unix = f"unix://{tmp_path}/other.sock"
    for name, settings in {
        "listen": {"listen": [unix, f"127.0.0.1:{port}"]},
        "http": {"listen": [unix], "http": f"127.0.0.1:{port}"},
    }.items():
        store = spawn(shm_dir=str(tmp_path), **settings)
        assert await store.wait() == 1
        assert f"{name}: can't listen on" in store.log.read_text()
        assert arenas(tmp_path) == []
        assert not (tmp_path / "other.sock").exists()
    server.close()


async def test_a_file_in_the_place_of_the_socket_stays(spawn: Spawn, tmp_path: Path) -> None:
    precious = tmp_path / "run" / "kvsieve.sock"
    precious.parent.mkdir()
    precious.write_text("precious")
    assert await spawn().wait() == 1
    assert precious.read_text() == "precious"


async def test_socket_and_directory_are_for_the_owner_only(spawn: Spawn) -> None:
    store = spawn()
    await store.has_logged("ready")
    address = parse_address(store.endpoint)
    assert isinstance(address, UnixAddress)
    assert oct(address.path.stat().st_mode & 0o777) == "0o600"
    assert oct(address.path.parent.stat().st_mode & 0o777) == "0o700"


async def test_json_log_lines(spawn: Spawn) -> None:
    store = spawn(log_format="json")
    await store.has_logged('"message": "ready"')
    lines = [json.loads(line) for line in store.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} == lines[-1].keys()


async def test_readyz_turns_from_503_to_200(spawn: Spawn, unused_port: int) -> None:
    store = spawn(http=f"127.0.0.1:{unused_port}", pool_size=8 * EXTENTS * EXTENT)
    seen: list[int] = []

    async def ready() -> bool:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{unused_port}/readyz") as answer,
            ):
                seen.append(answer.status)
        except aiohttp.ClientError:
            return False
        return seen[-1] == 200

    await until(ready)
    assert set(seen) <= {503, 200}
    assert store.process.poll() is None
