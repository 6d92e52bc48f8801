"""Two stores in processes of their own, with the same blocks to be had in one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from kvsieve_store.client import ArenaMap, Pulled, StoreClient
from kvsieve_store.protocol.spec import Plane, PoolSpec
from tests.conftest import StoreProcess
from tests.protocol.client_stores import chain, entries

BLOCK = 256 << 10
LAYERS = 4
SPEC = PoolSpec(
    "peers", "model", "bfloat16", 16, "sha256", "0", "test", 1, (Plane("main", (BLOCK // LAYERS,) * LAYERS),)
)
WAIT = 30.0


def content(n: int) -> np.ndarray:
    """uint8 [BLOCK]: the bytes of the n-th block."""
    return np.random.default_rng(n).integers(0, 256, BLOCK, np.uint8)


class Host:
    """A store process, and an engine that is attached to it."""

    def __init__(self, store: StoreProcess, client: StoreClient) -> None:
        self.store = store
        self.client = client
        self.address = store.endpoint
        """Of the store, for others."""
        self.channel = grpc.insecure_channel(store.endpoint)
        self.peer = peer_pb2_grpc.PeerStub(self.channel)

    def save(self, count: int, start: int = 0) -> list[bytes]:
        """Seals blocks with content(); returns their keys."""
        keys = chain(count, start)
        attachment = self.client.wait_attached(WAIT)
        self.client.reserve(count)
        refs = self.client.take_credits(count)
        assert len(refs) == count
        with ArenaMap(attachment) as arena:
            for n, ref in enumerate(refs, start):
                arena.slot(ref.slot)[:] = content(n)
        self.client.seal(entries(keys, refs))
        return keys

    def holds(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many of the keys match; their bytes are compared."""
        match = self.client.match(keys)
        with ArenaMap(self.client.wait_attached(WAIT)) as arena:
            for n, ref in enumerate(match.refs, start):
                assert (arena.slot(ref.slot) == content(n)).all(), n
        self.client.release(match.lease_ids)
        return len(match.refs)

    def pull(self, source: str, keys: Sequence[bytes], **fields: Any) -> Pulled:
        self.client.wait_attached(WAIT)
        return self.client.pull(source, keys, **{"seconds": 60.0, **fields})

    def start_pull(self, source: str, keys: Sequence[bytes], wait_ms: int = 0) -> Any:
        """The bare call, to be cancelled."""
        self.client.wait_attached(WAIT)
        request = pb.PullRequest(
            session_id=self.session_id,
            source=source,
            keys=b"".join(keys),
            timeout_ms=60_000,
            wait_ms=wait_ms,
        )
        return self.peer.Pull.future(request)

    @property
    def session_id(self) -> bytes:
        """The secret of the client's session."""
        session = self.client._core._session
        assert session is not None
        return session._id

    def metric(self, name: str) -> float:
        """Sum of the samples of a metric."""
        lines = [
            line for line in self.store.metrics().splitlines() if line.partition("{")[0].split(" ")[0] == name
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def settled(self) -> None:
        """No offer, pull or lease is left, and no slot is held but by the engine."""
        end = time.monotonic() + WAIT
        names = ("kvsieve_peer_offers", "kvsieve_peer_pulls", "kvsieve_leases", "kvsieve_fencing_sessions")
        names += ("kvsieve_held_blocks",)
        while any(self.metric(name) for name in names) or self.metric("kvsieve_sessions") > 1:
            assert time.monotonic() < end, self.store.metrics()
            time.sleep(0.05)

    def close(self) -> None:
        self.channel.close()
        self.client.close()


@contextmanager
def host(start: Callable[..., StoreProcess], *flags: str) -> Iterator[Host]:
    store = start("--peer-listen", "127.0.0.1:0", "--extent-size", "4MiB", *flags)
    client = StoreClient(store.endpoint, SPEC, engine_id="engine", credit_target=0)
    client.start()
    it = Host(store, client)
    try:
        yield it
    finally:
        it.close()


@pytest.fixture(params=["shm", "ucx", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(start_store: Callable[..., StoreProcess], transport: str) -> Iterator[tuple[Host, Host]]:
    """The store that has blocks, and the one that pulls them."""
    flags = ("--peer-transports", transport)
    with host(start_store, *flags) as source, host(start_store, *flags) as target:
        yield source, target
