"""Real stores, in this process or in one of their own, and an engine that speaks the bare protocol."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsieve.v1 import admin_pb2 as admin
from kvsieve.v1 import admin_pb2_grpc, store_pb2_grpc
from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.client import AdminClient
from kvsieve_store.protocol.spec import Plane, PoolSpec
from kvsieve_store.server.store import Store
from kvsieve_store.settings import StoreSettings
from tests.protocol.client_stores import store_thread
from tests.protocol.client_stores import until as settled

EXTENT = 1 << 20
EXTENTS = 8
SPEC = PoolSpec("pool", "model", "bfloat16", 16, "sha256", "", "LBHNC", 1, (Plane("main", (65_536, 65_536)),))
SLOTS_PER_EXTENT = 7
ROOT = bytes(32)

_SERVE = """
import json, sys
from kvsieve_store.server.process import run
from kvsieve_store.settings import load
sys.exit(run(load(json.loads(sys.argv[1]), None, {})))
"""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def small(directory: Path, **overrides: Any) -> dict[str, Any]:
    """Settings of a store of 8 extents on a socket in `directory`."""
    return {
        "pool_size": EXTENTS * EXTENT,
        "extent_size": EXTENT,
        "segment_size": 4 * EXTENT,
        "listen": [f"unix://{directory}/run/kvsieve.sock"],
        "http": "127.0.0.1:0",
        **overrides,
    }


class Engine:
    """One client connection. attach() opens its session; credits: its free slots, (slot, generation) each."""

    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.aio.insecure_channel(endpoint.removeprefix("tcp://"))
        self.store = store_pb2_grpc.StoreStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.stream: Any = None
        self.welcome = pb.Welcome()
        self.credits: list[tuple[int, int]] = []
        self._lock: int | None = None

    @property
    def session_id(self) -> bytes:
        return self.welcome.session_id

    async def attach(self, spec: PoolSpec | pb.PoolSpec = SPEC, **hello: Any) -> pb.Welcome:
        """Sends Hello and reads Welcome; raises grpc.aio.AioRpcError when it is refused."""
        fields = {
            "protocol_version": 1,
            "engine_id": "engine",
            "credit_target": 4,
            "pid": os.getpid(),
            **hello,
        }
        pool = spec.to_proto() if isinstance(spec, PoolSpec) else spec
        await self.send(pb.AttachRequest(hello=pb.Hello(pool=pool, **fields)))
        self.welcome = (await self.receive()).welcome
        self.take(self.welcome.credits)
        return self.welcome

    async def send(self, message: pb.AttachRequest) -> None:
        if self.stream is None:
            self.stream = self.store.Attach()
        # Raised when the store has ended the stream; receive() says why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self.stream.write(message)

    async def receive(self) -> pb.AttachResponse:
        """The next message of the session; raises grpc.aio.AioRpcError at its end."""
        message = await self.stream.read()
        if message is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self.stream.code(),
                await self.stream.initial_metadata(),
                await self.stream.trailing_metadata(),
                details=await self.stream.details(),
            )
        return message

    def take(self, credits: pb.Credits) -> None:
        assert len(credits.slots) == len(credits.generations)
        self.credits += zip(credits.slots, credits.generations, strict=True)

    def lock(self) -> None:
        """Holds the session's lock file, as a process that has the arena mapped does."""
        self._lock = os.open(self.welcome.lock_path, os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def seal(self, *numbers: int, parents: bytes | None = None) -> list[int]:
        """Seals the next credits under these keys, as one chain; returns their status."""
        return list((await self.seal_and_lease(*numbers, parents=parents, lease_ms=0)).status)

    async def seal_and_lease(
        self, *numbers: int, parents: bytes | None = None, lease_ms: int, lease_id: int = 0
    ) -> pb.SealResponse:
        """As seal(), with a lease, or added to one; returns the answer."""
        refs = [self.credits.pop(0) for _ in numbers]
        chain = (ROOT + keys(*numbers))[: 32 * len(numbers)]
        answer = await self.store.Seal(
            pb.SealRequest(
                session_id=self.session_id,
                keys=keys(*numbers),
                parents=chain if parents is None else parents,
                slots=[slot for slot, _ in refs],
                generations=[generation for _, generation in refs],
                lease_ms=lease_ms,
                lease_id=lease_id,
            )
        )
        self.take(answer.credits)
        return answer

    async def match(self, *numbers: int, lease_ms: int = 0) -> pb.MatchResponse:
        return await self.store.Match(
            pb.MatchRequest(session_id=self.session_id, keys=keys(*numbers), lease_ms=lease_ms)
        )

    async def close(self) -> None:
        self.unlock()
        if self.stream is not None:
            self.stream.cancel()
        await self.channel.close()


async def snapshot(engine: Engine) -> str:
    """All that operators can see, but for times and memory: equal snapshots mean that nothing changed."""
    status = await engine.admin.Status(admin.StatusRequest())
    sessions = await engine.admin.ListSessions(admin.ListSessionsRequest())
    pools = await engine.admin.ListPools(admin.ListPoolsRequest())
    status.ClearField("uptime_seconds")
    status.ClearField("rss_bytes")
    for session in sessions.sessions:
        session.ClearField("age_seconds")
        session.ClearField("idle_seconds")
    blocks = [await engine.admin.ListBlocks(admin.ListBlocksRequest(pool=pool.name)) for pool in pools.pools]
    return "\n".join(str(part) for part in (status, sessions, pools, *blocks))


async def fails(call: Awaitable[Any], code: grpc.StatusCode, text: str) -> None:
    """Asserts that a call fails with a code, and with a message that contains `text`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), text in (caught.value.details() or "")) == (code, True), caught.value


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Waits for what another process or the store's clock brings about."""
    async with asyncio.timeout(seconds):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def make_store(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """make_store(setting=value, ...) -> a ready Store in this process."""
    stores: list[Store] = []

    async def make(ready: bool = True, **overrides: Any) -> Store:
        store = Store(StoreSettings(**small(tmp_path, **overrides)))
        await store.__aenter__()
        stores.append(store)
        if ready:
            await store.wait_until_ready()
        return store

    yield make
    for store in stores:
        await store.__aexit__(None, None, None)


@pytest.fixture
async def store(make_store: Callable[..., Awaitable[Store]]) -> Store:
    """A ready store of 8 extents in this process, on a unix socket and a TCP port."""
    return await make_store()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Engine]]:
    """connect(endpoint) -> an Engine."""
    engines: list[Engine] = []

    def make(endpoint: str) -> Engine:
        engines.append(Engine(endpoint))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
async def engine(store: Store, connect: Callable[[str], Engine]) -> Engine:
    """An engine that is attached to `store`, with four credits."""
    engine = connect(store.endpoints[0])
    await engine.attach()
    return engine


class StoreProcess:
    """A store in a process of its own; log: what it wrote to standard error."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.endpoint: str = settings["listen"][0]
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, json.dumps(settings)], stdin=subprocess.DEVNULL, stderr=file
            )

    async def wait(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, 20)

    async def has_logged(self, text: str) -> None:
        """Until the log contains `text`; fails when the process ends without it."""

        async def found() -> bool:
            ended = self.process.poll() is not None
            if text in self.log.read_text():
                return True
            assert not ended, self.log.read_text()
            return False

        await until(found)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    """spawn(setting=value, ...) -> a StoreProcess, which may not be ready yet."""
    stores: list[StoreProcess] = []

    def start(**overrides: Any) -> StoreProcess:
        log = tmp_path / f"store-{len(stores)}.log"
        stores.append(StoreProcess(small(tmp_path, **overrides), log))
        return stores[-1]

    yield start
    for store in stores:
        # A killed store would leave its arena behind.
        store.process.terminate()
        store.process.wait(20)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of a store on a thread of this process, for the tests of a module."""
    with store_thread() as endpoint:
        yield endpoint


@pytest.fixture
def empty(endpoint: str) -> None:
    """The test begins with an empty store at `endpoint`."""
    with AdminClient(endpoint) as admin:
        settled(lambda: admin.status().sessions == 0 and not admin.list_sessions().sessions)
        admin.clear()
