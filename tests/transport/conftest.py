"""Peers in processes of their own, links to them, and memory to read into."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvsieve_store.transport.base import Link
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.memory import Memory
from tests.transport.peer import Peer

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


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """start_peer(size, ...) -> a Peer; all are ended after the test."""
    peers: list[Peer] = []

    def start(size: int, *arguments: str) -> Peer:
        peers.append(Peer(size, *arguments))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def link_to() -> Iterator[Callable[[Peer, Memory, str], Link]]:
    """link_to(peer, memory, transport) -> a Link; all are closed after the test."""
    links: list[Link] = []

    def link(peer: Peer, memory: Memory, transport: str) -> Link:
        links.append(connect(peer.description, memory, soon(), transports=[transport]))
        return links[-1]

    yield link
    for each in links:
        each.close()
