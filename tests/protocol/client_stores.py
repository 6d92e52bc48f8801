"""A real store in a thread, and what tests of its client need around it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsieve_store.client import SealEntry, SlotRef, StoreClient
from kvsieve_store.protocol.spec import Plane, PoolSpec
from kvsieve_store.server.store import Store
from kvsieve_store.settings import StoreSettings

SLOT_BYTES = 64 << 10
EXTENT_BYTES = 1 << 20

SPEC = PoolSpec(
    name="tests",
    model="model",
    dtype="bfloat16",
    block_tokens=16,
    hash_algo="sha256",
    hash_seed="0",
    layout="test",
    tp_size=1,
    planes=(Plane("main", (SLOT_BYTES // 4,) * 4),),
)


def key(n: int) -> bytes:
    """The n-th key: 32 bytes, as well spread as a hash."""
    return ((n + 1) * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 4


def chain(count: int, start: int = 0) -> list[bytes]:
    return [key(n) for n in range(start, start + count)]


def entries(keys: Sequence[bytes], refs: Sequence[SlotRef]) -> list[SealEntry]:
    """One chain of blocks."""
    return [SealEntry(k, p, r) for k, p, r in zip(keys, [b"", *keys], refs, strict=False)]


def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Waits for what another thread or process brings about."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_locked(path: str) -> bool:
    """Whether some process holds the session's lock, as the store finds out."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_chain(client: StoreClient, keys: Sequence[bytes]) -> list[SlotRef]:
    """Seals one chain without a look at the bytes."""
    refs: list[SlotRef] = []
    until(lambda: refs.extend(client.take_credits(len(keys) - len(refs))) or len(refs) == len(keys))
    client.seal(entries(keys, refs))
    return refs


@contextmanager
def store_thread(*, wait: bool = True, **settings: Any) -> Iterator[str]:
    """A store of this process, in an event loop and a thread of its own; yields its endpoint.

    wait: until engines can attach; otherwise until it listens.
    """
    home = Path(tempfile.mkdtemp(prefix="kvsieve-"))
    endpoint = f"unix://{home}/s.sock"
    values = {
        "pool_size": 32 << 20,
        "extent_size": EXTENT_BYTES,
        "segment_size": 16 << 20,
        "listen": (endpoint,),
        "http": "",
        "shm_dir": home,
    }
    store = Store(StoreSettings(**(values | settings)))
    ready = threading.Event()
    failures: list[Exception] = []

    async def serve() -> None:
        async with store:
            if wait:
                await store.wait_until_ready()
            ready.set()
            await store.wait_until_stop()

    loop = asyncio.new_event_loop()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except Exception as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait(30)
        if failures:
            raise failures[0]
        yield endpoint
    finally:
        loop.call_soon_threadsafe(store.request_stop)
        thread.join(30)
        loop.close()
        shutil.rmtree(home, ignore_errors=True)


def client(endpoint: str, **options: Any) -> StoreClient:
    """An attached client; its credits are few against the 480 slots of the arena."""
    started = StoreClient(endpoint, SPEC, **({"engine_id": "test", "credit_target": 16} | options))
    started.start()
    started.wait_attached(20)
    return started
