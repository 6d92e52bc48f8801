"""Two TP ranks, each a process: each writes its shard of what is sharded, one writes what is replicated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvsieve_store.client.admin import AdminClient
from tests.conftest import StoreProcess
from tests.engine.generate import counters, generate, prompt, seals_done

Engine = Callable[..., AbstractContextManager[Any]]

PROMPTS = [prompt(n, seed) for seed, n in enumerate([100, 300, 700])]
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_log_stats": False,
    "dtype": "float32",  # batches depend on when matches are answered, and bfloat16 rounds with them
}


@pytest.fixture(autouse=True)
def _ranks_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")


@pytest.mark.parametrize(
    ("model", "block", "copies"),
    [
        pytest.param("tiny_qwen3", 32, 2, id="gqa-sharded"),
        pytest.param("tiny_dsv3", 16, 1, id="mla-replicated"),
    ],
)
def test_two_ranks_fill_and_read_one_block(
    model: str,
    block: int,
    copies: int,
    engine: Engine,
    store: StoreProcess,
    request: Any,
) -> None:
    """copies: how many ranks' bytes one block holds."""
    path: Path = request.getfixturevalue(model)
    blocks = sum((len(ids) - 1) // block for ids in PROMPTS)
    with engine(path, store.endpoint, **TWO_RANKS) as llm:
        saved = generate(llm, PROMPTS)
        seals_done(llm)
        written = counters(llm)["saved_bytes"]
        sealed = counters(llm)["saved_blocks"]
        with AdminClient(store.endpoint) as admin:
            (pool,) = admin.list_pools().pools
        assert pool.tp_size == copies
    with engine(path, store.endpoint, **TWO_RANKS) as llm:
        loaded = generate(llm, PROMPTS)
        read = counters(llm)
    assert sealed >= blocks
    assert read["loaded_blocks"] == blocks
    assert [a.cached for a in loaded] == [(len(ids) - 1) // block * block for ids in PROMPTS]
    assert max(a.distance(b) for a, b in zip(saved, loaded, strict=True)) <= 1e-3
    # Each rank reads its part; of what is replicated, each reads the one copy.
    bytes_per_block = written // sealed
    assert read["loaded_bytes"] == blocks * bytes_per_block * (2 // copies)


def test_each_rank_reads_its_heads_of_the_arena(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """Sparse mode of a dense model, in a pool of 24 blocks, with a budget of the whole context."""
    prompts = [prompt(n, seed) for seed, n in enumerate([1500, 300])]
    chunks = {"max_num_batched_tokens": 256}
    with engine(tiny_qwen3, dtype="float32", **chunks) as llm:
        stock = generate(llm, prompts)
    small = TWO_RANKS | chunks | {"kv_cache_memory_bytes": 3 << 19}
    for known in (0, 1472):
        exact = {"mode": "sparse", "budget_tokens": 2048}
        with engine(tiny_qwen3, store.endpoint, kvsieve=exact, **small) as llm:
            answers = generate(llm, prompts)
            seals_done(llm)
            stats = counters(llm)
        assert answers[0].cached == known
        assert max(a.distance(b) for a, b in zip(answers, stock, strict=True)) <= 1e-3
        assert stats["staged_blocks"] > 0
    assert stats["loaded_blocks"] == 0
