"""Sparse mode on dense models, on a real engine whose pool is far too small for its requests.

With a budget of the whole context attention is exact, wherever the blocks are: then answers are stock vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess
from tests.engine.generate import Answer, connector_of, counters, generate, prompt, seals_done
from tests.engine.test_cache_mode import ROUNDING, full_blocks
from tests.engine.test_serving import wait_for
from tests.fault.test_engine import add
from tests.gpu.host_backed import block_pool, scheduler_of, throw_out

Engine = Callable[..., AbstractContextManager[Any]]

BLOCK = 32
PROMPTS = [prompt(n, seed) for seed, n in enumerate([1500, 300, 257, 1200])]
ARGS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256}
SMALL_POOL = {**ARGS, "kv_cache_memory_bytes": 3 << 20, "disable_log_stats": False}
"""24 blocks of 128 KiB, one of them vLLM's null block: half of one long prompt."""

EXACT = {"mode": "sparse", "budget_tokens": 4096}


@pytest.fixture(scope="module")
def stock(tiny_qwen3: Path) -> list[Answer]:
    """Answers of vLLM without a connector."""
    from tests.engine.conftest import run_engine

    with run_engine(tiny_qwen3, **ARGS) as llm:
        return generate(llm, PROMPTS, max_tokens=40)


def distance(answers: list[Answer], others: list[Answer]) -> float:
    return max(a.distance(b) for a, b in zip(answers, others, strict=True))


@pytest.mark.parametrize(
    "settings", [EXACT, {"mode": "sparse", "budget_tokens": 32, "dense_layers": 4}], ids=["budget", "layers"]
)
def test_attention_to_all_is_that_of_stock_vllm(
    settings: dict[str, Any], engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    with engine(tiny_qwen3, store.endpoint, kvsieve=settings, **SMALL_POOL) as llm:
        free = block_pool(llm).get_num_free_blocks()
        answers = generate(llm, PROMPTS, max_tokens=40)
        stats = counters(llm)
        assert block_pool(llm).get_num_free_blocks() == free
    assert distance(answers, stock) <= ROUNDING
    assert stats["lost_blocks"] > 40
    assert stats["staged_blocks"] > 0
    assert stats.get("asked_pieces", 0) == 0


def test_a_decode_step_attends_to_what_the_budget_says(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    settings = {"mode": "sparse", "budget_tokens": 100, "first_blocks": 2, "selector": "quest-bounds"}
    with engine(tiny_qwen3, store.endpoint, kvsieve=settings, **SMALL_POOL) as llm:
        (answer,) = generate(llm, PROMPTS[:1], max_tokens=40)
        stats = counters(llm)
    layers, heads, steps, attended = 4, 2, 39, 2 + 4 + 2
    assert len(answer.tokens) == 40
    assert stats["asked_pieces"] == layers * heads * steps * attended
    assert stats["asked_pieces"] == stats["pool_pieces"] + stats["arena_pieces"]
    assert stats["arena_read_bytes"] == stats["arena_pieces"] * 2 * 32 * 64 * 4
    assert stats["summarised_blocks"] == (1500 + 39) // BLOCK


def test_vllms_own_block_size_and_bfloat16(engine: Engine, store: StoreProcess, tiny_qwen3: Path) -> None:
    """Whatever the instruction set makes of it. One prompt, so that chunks are the same."""
    args: dict[str, Any] = {"dtype": "bfloat16", "block_size": 128, "max_num_batched_tokens": 256}
    with engine(tiny_qwen3, **args) as llm:
        stock = generate(llm, PROMPTS[:1], max_tokens=40)
    small = {"kv_cache_memory_bytes": 2 << 20, "disable_log_stats": False}
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **args, **small) as llm:
        answers = generate(llm, PROMPTS[:1], max_tokens=40)
        assert block_pool(llm).num_gpu_blocks == 8
        assert counters(llm)["staged_blocks"] > 0
    assert distance(answers, stock) <= ROUNDING


def test_a_request_that_fits_the_pool_is_stock_vllms(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    """No block of it is lost, so that a budget of nothing changes nothing."""
    settings = {"mode": "sparse", "budget_tokens": 0}
    with engine(tiny_qwen3, store.endpoint, kvsieve=settings, **ARGS, disable_log_stats=False) as llm:
        answers = generate(llm, PROMPTS, max_tokens=40)
        assert counters(llm)["lost_blocks"] == 0
    assert distance(answers, stock) <= ROUNDING


def test_a_restarted_engine_begins_with_what_the_store_has(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **SMALL_POOL) as llm:
        generate(llm, PROMPTS, max_tokens=40)
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **SMALL_POOL) as llm:
        answers = generate(llm, PROMPTS, max_tokens=40)
        again = generate(llm, PROMPTS[:1], max_tokens=40)
        stats = counters(llm)
    assert [a.cached for a in answers] == [full_blocks(len(ids), BLOCK) for ids in PROMPTS]
    assert max(distance(answers, stock), distance(again, stock[:1])) <= ROUNDING
    assert again[0].cached == full_blocks(len(PROMPTS[0]), BLOCK), "the local prefix cache is not asked"
    assert stats["loaded_blocks"] == 0, "what the arena has is read there"


AT = pytest.mark.parametrize("at", [800, 1515], ids=["in-prefill", "in-decode"])
"""Tokens of the first request, of 1,500 and 40, when something happens."""


def run(
    llm: Any, prompts: list[list[int]], at: int, event: Callable[[], object]
) -> dict[str, tuple[int, ...]]:
    """Answers to r0, r1, ... `event` is called between two steps, once r0 has computed `at` tokens."""
    add(llm, prompts, 40)
    answers, happened = {}, False
    while llm.llm_engine.has_unfinished_requests():
        running = {r.request_id.split("-")[0]: r.num_computed_tokens for r in scheduler_of(llm).running}
        if not happened and running.get("r0", 0) >= at:
            happened = True
            event()
        for output in llm.llm_engine.step():
            if output.finished:
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
    assert happened
    return answers


@AT
def test_preempted_requests_go_on(
    at: int, engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **SMALL_POOL) as llm:
        answers = run(llm, PROMPTS, at, lambda: throw_out(llm))
        assert counters(llm)["matched_blocks"] >= at // BLOCK - 1
    assert answers == {f"r{n}": stock[n].tokens for n in range(4)}


@AT
def test_an_aborted_request_leaves_nothing(
    at: int, engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **SMALL_POOL) as llm:
        free = block_pool(llm).get_num_free_blocks()
        answers = run(llm, PROMPTS, at, lambda: llm.llm_engine.abort_request(["r0"]))
        seals_done(llm)
        half = connector_of(llm)._scheduler
        assert not half._hosts
        assert not half._releases
        assert half._ledger.pages == half._ledger.host_backed == 0
        assert not connector_of(llm, "worker")._worker._runtime.contexts._contexts
        assert block_pool(llm).get_num_free_blocks() == free
    assert answers == {f"r{n}": stock[n].tokens for n in range(1, 4)}


@AT
def test_the_store_is_killed(
    at: int, engine: Engine, store: StoreProcess, tiny_qwen3: Path, stock: list[Answer]
) -> None:
    """What is in its arena is read on, and the next store used."""
    with engine(tiny_qwen3, store.endpoint, kvsieve=EXACT, **SMALL_POOL) as llm:

        def kill() -> None:
            store.kill()
            if at < 1500:  # the rest of a prompt that is longer than the pool needs a store
                store.start()

        answers = run(llm, PROMPTS[:2], at, kill)
        assert answers == {f"r{n}": stock[n].tokens for n in range(2)}
        if at >= 1500:
            store.start()
        client = connector_of(llm)._session._client
        wait_for(lambda: client.attachment is not None)
        assert distance(generate(llm, PROMPTS, max_tokens=40), stock) <= ROUNDING
        seals_done(llm)
        assert counters(llm)["store_losses"] == 1


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("tiny_gemma3", {}, "needs full, causal attention .* a window of 128 tokens"),
        ("tiny_qwen3", {"hot_rows": 64}, "kvsieve.hot_rows given, which means nothing on a CPU"),
        ("tiny_qwen3", {"dense_layers": 5}, "dense_layers: 5 given, the model has 4 layers"),
        ("tiny_qwen3", {"save_decode": False}, "save_decode=false given, sparse mode requires true"),
    ],
)
def test_what_it_refuses(
    model: str, settings: dict[str, Any], message: str, engine: Engine, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    with (
        pytest.raises(ValueError, match=message),
        engine(path, "unix:///nowhere", kvsieve={"mode": "sparse", "connect_timeout_ms": 0} | settings),
    ):
        pass


@pytest.mark.timeout(600)
def test_a_needle_is_found_with_an_eighth_of_the_context(
    engine: Engine, start_store: Callable[..., StoreProcess], smollm2: Path
) -> None:
    """6,000 tokens, in a pool for less than a quarter of them."""
    store = start_store("--pool-size", "512MiB")
    args: dict[str, Any] = {"dtype": "float32", "max_model_len": 8192, "max_num_batched_tokens": 512}
    settings = {"mode": "sparse", "budget_tokens": 608}  # with first, newest and last blocks: 736
    with engine(
        smollm2,
        store.endpoint,
        kvsieve=settings,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        **args,
    ) as llm:
        tokens, key = needle(llm.get_tokenizer(), 6000, depth=0.4)
        (answer,) = generate(llm, [tokens], max_tokens=8)
        text = llm.get_tokenizer().decode(answer.tokens)
        stats = counters(llm)
        blocks = block_pool(llm).num_gpu_blocks
    assert key in text
    assert 5900 <= len(tokens) <= 6144
    assert blocks <= len(tokens) / BLOCK / 4
    heads, layers, steps = 3, 30, 7
    attended = stats["asked_pieces"] / heads / layers / steps
    assert (attended + 1) * BLOCK <= len(tokens) / 8
    assert stats["lost_blocks"] >= len(tokens) // BLOCK - blocks
    assert stats["arena_pieces"] > 0


def needle(tokenizer: Any, length: int, depth: float) -> tuple[list[int], str]:
    """About `length` tokens with a pass key at that depth, and the key."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    key = "48217"
    body = tokenizer.encode(filler * (length // 20))[: length - 80]
    cut = int(len(body) * depth)
    before = tokenizer.encode("There is an important pass key hidden in the text below. Remember it.\n")
    hidden = tokenizer.encode(f" The pass key is {key}. Remember it, {key} is the pass key. ")
    question = tokenizer.encode("\nWhat is the pass key? The pass key is")
    return before + body[:cut] + hidden + body[cut:] + question, key
