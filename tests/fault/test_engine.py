"""The store dies under an engine, an engine dies under the store. No request fails; nothing leaks.

The engine steps in this process, so that each kill lands exactly between two steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvsieve_store.client.admin import AdminClient
from kvsieve_store.protocol.layout import HEADER_BYTES
from tests.conftest import StoreProcess
from tests.engine.conftest import run_engine
from tests.engine.generate import connector_of, counters, generate, prompt, seals_done
from tests.engine.test_serving import wait_for
from tests.fault.proxy import Proxy

Engine = Callable[..., AbstractContextManager[Any]]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def engine() -> Engine:
    return run_engine


def add(llm: Any, ids: list[list[int]], max_tokens: int) -> None:
    from vllm import SamplingParams

    for number, tokens in enumerate(ids):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request(f"r{number}", {"prompt_token_ids": tokens}, params)


def step_until_done(llm: Any, at: dict[int, Callable[[], None]]) -> dict[str, tuple[int, ...]]:
    """Steps the engine until all requests are done; `at[n]` is called before step n. Request -> tokens."""
    answers = {}
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        if step in at:
            at[step]()
        for output in llm.llm_engine.step():
            if output.finished:
                assert output.outputs[0].finish_reason == "length"
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
        step += 1
    return answers


@pytest.mark.parametrize(
    "step", [1, 3, 6, 20], ids=["first-chunk", "mid-prefill", "late-prefill", "mid-decode"]
)
def test_store_killed_under_load_and_back(
    step: int, engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    ids = [prompt(1200, seed) for seed in range(4)]
    # The kill changes the batches, and bfloat16 rounds with them.
    args = {"max_num_batched_tokens": 512, "dtype": "float32"}
    with engine(tiny_qwen3, **args) as llm:
        plain = [a.tokens for a in generate(llm, ids, max_tokens=40)]
    with engine(tiny_qwen3, store.endpoint, disable_log_stats=False, **args) as llm:
        add(llm, ids, 40)
        answers = step_until_done(llm, {step: store.kill})
        assert [answers[f"r{n}"] for n in range(4)] == plain

        store.start()
        client = connector_of(llm)._session._client
        wait_for(lambda: client.attachment is not None)
        assert [a.tokens for a in generate(llm, [prompt(900, 50)], max_tokens=5)]
        seals_done(llm)
        assert counters(llm)["store_losses"] == 1
        with AdminClient(store.endpoint) as admin:
            assert admin.status().sealed_blocks > 0


@pytest.mark.parametrize("is_noticed", [True, False], ids=["step without a session", "session replaced"])
def test_connection_lost_under_load_and_back(
    is_noticed: bool, engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """The same store is attached anew: its memory stays where it is, and its blocks are found."""
    ids = [prompt(1200, seed) for seed in range(4)]
    args = {"max_num_batched_tokens": 512, "dtype": "float32"}
    with engine(tiny_qwen3, **args) as llm:
        plain = [a.tokens for a in generate(llm, ids, max_tokens=40)]
    with (
        Proxy(store.endpoint) as proxy,
        engine(tiny_qwen3, proxy.endpoint, disable_log_stats=False, **args) as llm,
        AdminClient(store.endpoint) as admin,
    ):
        client, worker = connector_of(llm)._session._client, connector_of(llm, "worker")._worker
        found: list[list[int]] = []

        def note() -> None:
            found.append([int(segment.ctypes.data) for segment in worker._arena.segments])

        def cut() -> None:
            note()
            proxy.cut()
            wait_for(lambda: client.attachment is None)
            if not is_noticed:
                mend()

        def mend() -> None:
            assert (worker._arena is None) == is_noticed
            proxy.mend()
            wait_for(lambda: client.attachment is not None and client.attachment.epoch == 2)

        add(llm, ids, 40)
        answers = step_until_done(llm, {5: cut, 8: mend if is_noticed else note})
        assert [answers[f"r{n}"] for n in range(4)] == plain
        note()
        assert found[0] == found[-1]
        seals_done(llm)
        assert counters(llm)["store_losses"] == 1
        assert counters(llm)["saved_blocks"] > 0
        wait_for(lambda: [s.state for s in admin.list_sessions().sessions] == ["attached"])
        assert worker._arena.memory.store_lives()


def test_store_killed_between_match_and_load(engine: Engine, store: StoreProcess, tiny_qwen3: Path) -> None:
    """Matched and allocated, then the store is gone and another is there before the load starts."""
    ids = prompt(1500)
    with engine(tiny_qwen3, store.endpoint) as llm:
        plain = generate(llm, [ids])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint) as llm:
        half = connector_of(llm)._scheduler
        allocated, client = half.allocated, connector_of(llm)._session._client

        def lose_store(*args: Any) -> None:
            allocated(*args)
            epoch = client.attachment.epoch
            store.kill()
            store.start()
            wait_for(lambda: client.attachment is not None and client.attachment.epoch > epoch)

        half.allocated = lose_store
        answers = generate(llm, [ids])
        half.allocated = allocated
    assert answers[0].tokens == plain[0].tokens


def test_blocks_overwritten_while_they_are_loaded_are_not_served(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """The lease is lost and a slot is written anew during the copy: the load fails, the answer is right."""
    ids = prompt(1500)
    with engine(tiny_qwen3, store.endpoint) as llm:
        plain = generate(llm, [ids])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint, disable_log_stats=False) as llm:
        generate(llm, [prompt(40, 9)])  # maps the arena
        worker = connector_of(llm, "worker")._worker
        copies, arena = worker._engine, worker._arena
        load = copies._load

        def load_while_slot_is_reused(order: Any) -> tuple[int, bool]:
            generations = arena.generations

            def first_look(slots: Any) -> Any:
                found = generations(slots)
                del arena.generations
                reuse(arena, order.refs[3].slot)
                return found

            arena.generations = first_look
            result: tuple[int, bool] = load(order)
            return result

        copies._load = load_while_slot_is_reused
        answers = generate(llm, [ids])
        assert counters(llm)["failed_loads"] == 1
        assert answers[0].tokens == plain[0].tokens
        assert answers[0].cached == 0


def reuse(arena: Any, slot: int) -> None:
    """What a grant of this slot to another session does to it."""
    segment, extent, i = arena._locate(slot)
    arena._words64[segment][(extent + i * HEADER_BYTES) // 8] += 1
    arena.slot(slot)[:] = 0x5A


def test_engine_killed_mid_prefill_returns_its_slots(store: StoreProcess, tiny_qwen3: Path) -> None:
    """kill -9 between two steps of a prefill: unsealed slots come back, sealed blocks stay and are loaded."""
    script = Path(__file__).parent / "prefill_forever.py"
    child = subprocess.Popen(
        [sys.executable, str(script), str(tiny_qwen3), store.endpoint], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("prefilling"):
                break
        with AdminClient(store.endpoint) as admin:
            wait_for(lambda: admin.status().sealed_blocks >= 16, timeout=60)
            (session,) = admin.list_sessions().sessions
            assert session.held_slots > 0
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            wait_for(lambda: not admin.list_sessions().sessions, timeout=30)
            (pool,) = admin.list_pools().pools
            assert pool.writing_slots == 0
            assert pool.sealed_blocks >= 16
        with run_engine(tiny_qwen3, store.endpoint) as llm:
            assert generate(llm, [prompt(1800)])[0].cached >= 32
    finally:
        child.kill()


def test_engine_starts_and_serves_without_a_store_then_attaches(
    engine: Engine, start_store: Callable[..., StoreProcess], tiny_qwen3: Path
) -> None:
    store = start_store()
    store.kill()
    with engine(tiny_qwen3, store.endpoint, kvsieve={"connect_timeout_ms": 100}) as llm:
        first = generate(llm, [prompt(500)])
        assert connector_of(llm)._session._client.attachment is None
        store.start()
        wait_for(lambda: connector_of(llm)._session._client.attachment is not None)
        generate(llm, [prompt(500, 8)])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint) as llm:
        assert generate(llm, [prompt(500, 8)])[0].cached == 480
        assert generate(llm, [prompt(500)])[0].tokens == first[0].tokens
