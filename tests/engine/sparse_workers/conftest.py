"""A worker half of sparse mode, and sessions with a real store for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvsieve_connector import worker as cache_mode
from kvsieve_store.client import Attachment, StoreClient
from tests.conftest import StoreProcess
from tests.engine.sparse_worker import (
    Worker,
    connect,
)

Session = tuple[StoreClient, Attachment]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(cache_mode, "get_tensor_model_parallel_rank", lambda: 0)
    made: list[Worker] = []

    def make(**changes: Any) -> Worker:
        made.append(Worker(**changes))
        return made[-1]

    yield make
    for worker in made:
        worker.half.close()


@pytest.fixture
def worker(make: Callable[..., Worker]) -> Worker:
    return make()


@pytest.fixture
def store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store("--pool-size", "64MiB")


@pytest.fixture
def attach(store: StoreProcess, worker: Worker) -> Iterator[Callable[[], Session]]:
    """attach() -> a new session with the store. Of a session that is over nobody holds the lock."""
    clients: list[StoreClient] = []

    def attach() -> Session:
        clients.append(connect(store, worker))
        attachment = clients[-1].attachment
        assert attachment is not None
        return clients[-1], attachment

    yield attach
    for client in clients:
        client.close()
