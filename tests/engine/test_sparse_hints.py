"""Hints from end to end: the scheduler half on vLLM's KV cache manager, a worker half on CPU tensors, and a
real store process. What was hot when a request ended is hot again where somebody goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvsieve_connector import worker as cache_mode
from kvsieve_connector.metadata import HintLoad, HintSave
from kvsieve_connector.sparse.hints import hint_key
from kvsieve_store.client.admin import AdminClient
from tests.conftest import StoreProcess
from tests.engine.sparse_process import RealArenas, close, connect
from tests.engine.sparse_scene import Scene, Step
from tests.engine.sparse_vllm import BLOCK, new_request, tokens_of
from tests.engine.sparse_worker import HOT_BLOCKS, LAYERS, MAX_MODEL_LEN, SEQS, Worker
from tests.protocol.client_stores import until

PROMPT = tokens_of(1, 10 * BLOCK)


class Engine(Scene):
    """The scene's blocks, with a worker half that keeps the tables and the hints. Each decode step asks for
    rows of the first ten blocks, in every layer.

    hot: request -> per layer, the rows in its hot buffer after its last step.
    """

    def __init__(self, store: StoreProcess) -> None:
        client = connect(store, LAYERS)
        super().__init__(
            client,
            RealArenas(client),
            pool_mib=4,
            hot_blocks=HOT_BLOCKS,
            window_blocks=1,
            seqs=SEQS,
            max_model_len=MAX_MODEL_LEN,
            layers=LAYERS,
        )
        self.worker = Worker(prefetch="previous-step")
        self.hot: dict[str, list[set[int]]] = {}

    def close(self) -> None:
        self.worker.half.close()
        close(self)

    def say(self, name: str, tokens: list[int], answer: int = 4) -> list[int]:
        """Runs a request to its end; returns all of its tokens."""
        request = new_request(name, tokens, answer)
        self.submit(request)
        self.run()
        return list(request.all_token_ids)

    def stat(self, name: str) -> float:
        return self.half.stats.data.get(name, 0) + self.worker.half.stats.data.get(name, 0)

    @property
    def loads(self) -> list[tuple[str, int]]:
        """(request, tokens) of the hints that the worker was told to read."""
        return [(load.req_id, load.tokens) for orders in self.orders for load in orders.hint_loads]

    def _execute(self, scheduled: dict[str, tuple[int, Any, bool]]) -> None:
        super()._execute(scheduled)
        step = self.in_flight[-1]
        orders = replace(self.orders[-1], saves=[], loads=[])  # the scene's
        batch = {name: (self.device[name].computed - n, n) for name, n in step.scheduled.items()}
        self.worker.step(orders, **batch)
        for name, (computed, tokens) in batch.items():
            if tokens == 1 and self.worker.tables.slot(name) >= 0:
                for layer in range(LAYERS):
                    self.worker.swap_in(layer, [layer, 70 + layer, 300 + computed % 7])
            rows = self.worker.runtime.warm.hot_rows(name)
            if rows is not None:
                self.hot[name] = [{row for row in layer if row >= 0} for layer in rows.tolist()]
        report = self.worker.half.report()
        if report is not None:
            step.report.saved.update(report.saved)
            step.report.failed.update(report.failed)

    def _write_hint(self, order: HintSave, step: Step) -> None:
        """The worker half's."""

    def _read_hint(self, order: HintLoad) -> None:
        """The worker half's."""


@pytest.fixture
def store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store("--pool-size", "64MiB")


@pytest.fixture
def start(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Engine]]:
    """start() -> an engine on the store."""
    monkeypatch.setattr(cache_mode, "get_tensor_model_parallel_rank", lambda: 0)
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(Engine(store))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def keys_in(store: StoreProcess) -> list[bytes]:
    with AdminClient(store.endpoint) as admin:
        return [block.key for block in admin.list_blocks("m").blocks]


def evict(store: StoreProcess, key: bytes) -> None:
    """Once nobody has leased it."""
    with AdminClient(store.endpoint) as admin:
        until(lambda: bool(admin.evict("m", keys=key).evicted))


def key_of(engine: Engine, name: str, index: int) -> bytes:
    return engine.half.blocks.key(engine.requests[name], index)


def first_turn(engine: Engine, answer: int = 100, name: str = "a") -> list[int]:
    """A request that reads its prompt from the arena, and fills an eleventh block with its answer."""
    engine.say(f"before {name}", [*PROMPT, 1])
    assert engine.stat("stored_hints") == 0, "it has read nothing from the arena"
    return engine.say(name, [*PROMPT, 2], answer)


def test_an_engine_that_is_restarted_goes_on_with_the_rows_that_were_hot(start: Callable[[], Engine]) -> None:
    before = start()
    tokens = first_turn(before)
    assert before.stat("stored_hints") == 1
    assert all(before.hot["a"])
    before.close()
    engine = start()
    request = new_request("b", [*tokens, 3, 4], 2)
    engine.submit(request)
    while not engine.loads:
        engine.step()
    assert engine.loads == [("b", 11 * BLOCK)]
    assert engine.hot["b"] == before.hot["a"]
    assert engine.stat("used_hints") == 1
    assert engine.stat("warmed_rows") == sum(map(len, before.hot["a"]))
    engine.run()
    engine.check_empty()


def test_another_engine_of_the_store_goes_on_with_them_too(start: Callable[[], Engine]) -> None:
    one, other = start(), start()
    tokens = first_turn(one)
    other.say("b", [*tokens, 3, 4])
    assert other.loads == [("b", 11 * BLOCK)]
    assert all(theirs <= ours for theirs, ours in zip(one.hot["a"], other.hot["b"], strict=True))


def test_turn_after_turn(start: Callable[[], Engine]) -> None:
    engine = start()
    tokens = first_turn(engine)
    for turn in range(3):
        tokens = engine.say(f"turn {turn}", [*tokens, 5], BLOCK)
    assert engine.loads == [("turn 0", 11 * BLOCK), ("turn 1", 12 * BLOCK), ("turn 2", 13 * BLOCK)]
    assert engine.stat("stored_hints") == 4
    engine.check_empty()


def test_a_request_that_was_preempted_gets_its_rows_back(start: Callable[[], Engine]) -> None:
    engine = start()
    engine.say("first", [*PROMPT, 1])
    engine.submit(new_request("a", [*PROMPT, 2], 100))
    while not engine.hot.get("a", [set()])[0]:
        engine.step()
    engine.step()
    hot = engine.hot["a"]
    engine._preempt(engine.running.pop())
    engine.step()
    while not engine.running:
        engine.step()
    engine.run()
    assert engine.loads == [("a", 10 * BLOCK)]
    assert all(rows <= now for rows, now in zip(hot, engine.hot["a"], strict=True))
    engine.check_empty()


def test_a_hint_that_was_evicted_is_missed_and_nothing_else(
    store: StoreProcess, start: Callable[[], Engine]
) -> None:
    engine = start()
    tokens = first_turn(engine)
    evict(store, hint_key(key_of(engine, "a", 10)))
    engine.say("b", [*tokens, 3, 4])
    assert engine.loads == []
    assert engine.stat("matched_blocks") == 10 + 11
    engine.check_empty()


def test_a_hint_goes_with_its_block(store: StoreProcess, start: Callable[[], Engine]) -> None:
    engine = start()
    first_turn(engine)
    last = key_of(engine, "a", 10)
    assert {last, hint_key(last)} <= set(keys_in(store))
    evict(store, last)
    assert not {last, hint_key(last)} & set(keys_in(store))


def test_of_requests_with_the_same_last_block_one_hint_is_kept(
    store: StoreProcess, start: Callable[[], Engine]
) -> None:
    engine = start()
    first_turn(engine, answer=8)
    engine.say("b", [*PROMPT, 2, 3], 8)
    engine.submit(*(new_request(name, [*PROMPT, ord(name)], 8) for name in "cd"))
    engine.run()
    assert engine.loads == [(name, 10 * BLOCK) for name in "bcd"]
    assert engine.stat("stored_hints") == 1
    assert engine.stat("duplicate_blocks") == 0
    assert len(keys_in(store)) == 10 + 1
    engine.check_empty()
    with AdminClient(store.endpoint) as admin:
        until(lambda: not admin.status().leases)
        # What it held for hints that were there already is back.
        (pool,) = admin.list_pools().pools
        assert pool.writing_slots == engine.client.credits


def test_the_store_dies_while_a_hint_is_on_its_way(store: StoreProcess, start: Callable[[], Engine]) -> None:
    engine = start()
    engine.say("first", [*PROMPT, 1])
    engine.submit(new_request("a", [*PROMPT, 2], 100))
    while not engine.orders or not engine.orders[-1].hint_saves:
        engine.step()
    store.kill()
    engine.run(20_000)
    store.start()
    while engine.client.attachment is None:
        engine.step()
    tokens = first_turn(engine, name="c")
    engine.say("b", [*tokens, 3])
    assert engine.loads == [("b", 11 * BLOCK)]
    engine.check_empty()


def test_the_store_dies_while_it_is_asked_for_a_hint(
    store: StoreProcess, start: Callable[[], Engine]
) -> None:
    engine = start()
    tokens = first_turn(engine)
    engine.submit(new_request("b", [*tokens, 3], 20))
    while "b" not in engine.half._hosts:
        engine.step()
    store.kill()
    engine.run(20_000)
    assert "b" in engine.done
    engine.check_empty()
