"""The reader of the swap-in's counters: when it reads, and what it makes of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvsieve_connector.kernels import block_tables  # noqa: E402
from kvsieve_connector.kernels.tables import COUNTERS  # noqa: E402
from kvsieve_connector.sparse.counters import EVERY_STEPS, CounterReader, piece_stats, row_stats  # noqa: E402
from kvsieve_connector.stats import COUNTERS as STATS  # noqa: E402

LAYERS, SLOTS, ROW_BYTES = 3, 2, 656


class Worker:
    """Counters on a device, and what their reader has told so far."""

    def __init__(self) -> None:
        self.counters = torch.zeros(LAYERS, SLOTS, len(COUNTERS), dtype=torch.int64)
        self.reader = CounterReader(self.counters, COUNTERS)

    def count(self, name: str, amount: int) -> None:
        """In every layer and slot."""
        self.counters[..., COUNTERS.index(name)] += amount

    def poll(self, steps: int) -> list[dict[str, float]]:
        """What is found in so many steps, without what is not."""
        return [row_stats(found, ROW_BYTES) for _ in range(steps) if (found := self.reader.poll())]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_nothing_is_read_before_its_time(worker: Worker) -> None:
    worker.count("asked_rows", 5)
    assert worker.poll(EVERY_STEPS) == []


def test_a_reading_is_told_in_the_step_after_it(worker: Worker) -> None:
    worker.count("asked_rows", 5)
    worker.poll(EVERY_STEPS)
    worker.count("asked_rows", 100)  # too late for this one
    assert worker.poll(1) == [{"asked_rows": 5 * LAYERS * SLOTS}]
    assert worker.poll(EVERY_STEPS) == [{"asked_rows": 100 * LAYERS * SLOTS}]


def test_only_what_has_changed_is_told_and_only_once(worker: Worker) -> None:
    worker.count("asked_rows", 4)
    worker.count("gpu_rows", 4)
    assert worker.poll(EVERY_STEPS + 1) == [{"asked_rows": 24, "gpu_rows": 24}]
    assert worker.poll(3 * EVERY_STEPS) == []
    worker.count("gpu_rows", 1)
    assert worker.poll(EVERY_STEPS) == [{"gpu_rows": 6}]


def test_bytes_are_those_of_rows_fetched_in_time_and_ahead(worker: Worker) -> None:
    worker.count("missed_rows", 7)
    worker.count("peer_rows", 5)
    worker.count("prefetched_rows", 3)
    worker.count("prefetched_rows_used", 3)
    (found,) = worker.poll(EVERY_STEPS + 1)
    assert found["swapped_in_bytes"] == (2 + 3) * LAYERS * SLOTS * ROW_BYTES


def test_waits_are_told_in_seconds(worker: Worker) -> None:
    worker.count("swap_in_wait_ns", 500_000_000)
    assert worker.poll(EVERY_STEPS + 1) == [{"swap_in_wait_seconds": 0.5 * LAYERS * SLOTS}]


def test_all_that_is_told_has_a_metric(worker: Worker) -> None:
    for name in COUNTERS:
        worker.count(name, 1)
    (found,) = worker.poll(EVERY_STEPS + 1)
    assert found.keys() <= STATS.keys()
    assert len(found) == len(COUNTERS) + 1


def test_of_a_dense_model_too() -> None:
    counters = torch.ones(LAYERS, SLOTS, len(block_tables.COUNTERS), dtype=torch.int64)
    reader = CounterReader(counters, block_tables.COUNTERS)
    (found,) = [piece_stats(f, 8192) for _ in range(EVERY_STEPS + 1) if (f := reader.poll())]
    assert found.keys() <= STATS.keys()
    assert found["arena_read_bytes"] == LAYERS * SLOTS * 8192


def test_counters_stay_as_they_are(worker: Worker) -> None:
    worker.count("asked_rows", 7)
    before = worker.counters.clone()
    worker.poll(2 * EVERY_STEPS)
    assert torch.equal(worker.counters, before)
