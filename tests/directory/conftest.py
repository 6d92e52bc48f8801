"""Stores on loopback that share a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import StoreProcess, free_port
from tests.directory.redis_server import RedisServer, why_missing
from tests.peers.conftest import Host, host

StartHost = Callable[..., Host]


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """start_redis("--requirepass", "x") -> a RedisServer that answers; all are ended after the test."""
    if reason := why_missing():
        pytest.skip(reason)
    with ExitStack() as stack:

        def start(*options: str) -> RedisServer:
            server = RedisServer(*options)
            stack.callback(server.close)
            return server.start()

        yield start


@pytest.fixture
def redis(start_redis: Callable[..., RedisServer]) -> RedisServer:
    return start_redis()


@pytest.fixture
def start_host(start_store: Callable[..., StoreProcess]) -> Iterator[StartHost]:
    """start_host(url, ...flags) -> a store that has its directory there, with an engine."""
    with ExitStack() as stack:

        def start(url: str, *flags: str) -> Host:
            address = f"127.0.0.1:{free_port()}"
            ours = ("--directory", url, "--listen", address, "--peer-transports", "shm,tcp", *flags)
            started = stack.enter_context(host(start_store, *ours))
            started.address = address
            started.client.wait_attached(30)
            return started

        yield start
