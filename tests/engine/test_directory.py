"""A prefix that an engine of one host computed is loaded by an engine of another, from its own store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess, free_port
from tests.directory.redis_server import RedisServer, why_missing
from tests.engine.generate import counters, generate, prompt, seals_done
from tests.protocol.client_stores import until

BLOCK = 32
IDS = prompt(1000, 5)
FULL = (len(IDS) - 1) // BLOCK

Engine = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    if reason := why_missing():
        pytest.skip(reason)
    server = RedisServer()
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def stores(start_store: Callable[..., StoreProcess], redis: RedisServer) -> list[StoreProcess]:
    flags = ("--peer-listen", "127.0.0.1:0", "--directory", redis.url, "--peer-transports", "shm,tcp")
    return [start_store("--listen", f"127.0.0.1:{free_port()}", *flags) for _ in range(2)]


def test_a_request_hits_what_another_host_computed(
    engine: Engine, stores: list[StoreProcess], redis: RedisServer, tiny_qwen3: Path
) -> None:
    here, there = (store.endpoint for store in stores)
    with engine(tiny_qwen3, here, dtype="float32") as llm:
        (first,) = generate(llm, [IDS])
        (warm,) = generate(llm, [IDS])
        seals_done(llm)
    until(lambda: redis.size() >= FULL + 2)
    slow = {"fetch_timeout_ms": 30_000}
    for own, found in (({"fetch_timeout_ms": 0}, 0), (slow | {"fetch_min_blocks": 500}, 0), (slow, FULL)):
        with engine(tiny_qwen3, there, dtype="float32", disable_log_stats=False, kvsieve=own) as llm:
            (answer,) = generate(llm, [IDS])
            stats = counters(llm)
            if not found:  # what it has computed must not be found by the next one
                seals_done(llm)
                forget(stores[1])
        assert (answer.cached, stats["fetched_blocks"]) == (found * BLOCK, found)
        near = warm if found else first
        assert answer.distance(near) <= 1e-2


def test_without_the_directory_it_is_computed(
    engine: Engine, stores: list[StoreProcess], redis: RedisServer, tiny_qwen3: Path
) -> None:
    here, there = (store.endpoint for store in stores)
    with engine(tiny_qwen3, here, dtype="float32") as llm:
        (first,) = generate(llm, [IDS])
        seals_done(llm)
    until(lambda: redis.size() >= FULL + 2)
    redis.kill()
    with engine(tiny_qwen3, there, dtype="float32", disable_log_stats=False) as llm:
        (answer,) = generate(llm, [IDS])
        assert counters(llm)["match_timeouts"] == 0
    assert answer.cached == 0
    assert answer.distance(first) <= 1e-2


def forget(store: StoreProcess) -> None:
    from kvsieve_store.client import AdminClient

    with AdminClient(store.endpoint) as admin:
        admin.clear("")
