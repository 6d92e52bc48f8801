"""Peers in processes of their own, links to them, and memory to read into."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest

from kvsieve_store.transport.base import Link
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.ucx.binding import why_missing
from kvsieve_store.transport.ucx.engine import Engine
from tests.transport.peer import LOOPBACK, Peer

SECONDS = 30.0
"""Deadline of what is to go well; never waited for."""


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def private(size: int) -> tuple[Memory, np.ndarray]:
    """Memory to read into, and its one buffer."""
    buffer = np.zeros(size, np.uint8)
    return Memory([buffer]), buffer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


TLS = {"ucx-tcp": "tcp", "ucx-posix": "posix,cma", "ucx-sysv": "sysv,cma"}
"""What UCX may use under the names of UCX links."""

needs_ucx = pytest.mark.skipif(why_missing() is not None, reason=why_missing() or "")

LINKS = ["tcp", "shm", *(pytest.param(name, marks=needs_ucx) for name in TLS)]
"""Names of every kind of link."""


@pytest.fixture
def engines() -> Iterator[Callable[[str], Engine]]:
    """engines(TLS) -> an Engine of this process; all are closed after the test, with nothing left."""
    made: dict[str, Engine] = {}

    def engine(tls: str) -> Engine:
        if tls not in made:
            made[tls] = Engine(tls, LOOPBACK)
        return made[tls]

    yield engine
    for each in made.values():
        each.close()
        assert (each.operations, each.endpoints) == (0, 0)


class LinkTo(Protocol):
    def __call__(self, peer: Peer, memory: Memory, name: str, token: bytes | None = None) -> Link: ...


class StartPeer(Protocol):
    def __call__(self, size: int, name: str = "tcp") -> Peer: ...


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    """start_peer(size, name) -> a Peer for links of this name; all are ended after the test."""
    peers: list[Peer] = []

    def start(size: int, name: str = "tcp") -> Peer:
        peers.append(Peer(size, *([TLS[name]] if name in TLS else [])))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def link_to(engines: Callable[[str], Engine]) -> Iterator[LinkTo]:
    """link_to(peer, memory, name) -> a Link; all are closed after the test."""
    links: list[Link] = []

    def link(peer: Peer, memory: Memory, name: str, token: bytes | None = None) -> Link:
        engine = engines(TLS[name]) if name in TLS else None
        links.append(
            connect(
                peer.description,
                token or peer.token,
                memory,
                soon(),
                engine=engine,
                transports=[name.partition("-")[0]],
            )
        )
        return links[-1]

    yield link
    for each in links:
        each.close()
