"""Two GPUs: each rank writes its shard of what is sharded; of what is replicated, one writes, both read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess
from tests.engine.generate import connector_of, counters, generate, prompt, seals_done
from tests.gpu.forcing import compare, continued, one_by_one, together, tokens
from tests.gpu.test_sparse import HOT_ROWS, LENGTHS, STEPS, arguments_of

Engine = Callable[..., AbstractContextManager[Any]]

PROMPTS = [prompt(n, seed) for seed, n in enumerate([300, 1031, 5000])]
PINNING_SECONDS = 10
"""Far more than two workers need to pin 1 GiB; they live in processes of their own and can't be asked."""
SCARCE_BLOCKS = 1000
"""Of the sparse engines' pools: what all requests at once take beside their main planes, and little more."""


@pytest.mark.parametrize(
    ("model", "args", "copies"),
    [
        pytest.param("tiny_qwen3", {}, 2, id="gqa-sharded"),
        pytest.param("tiny_dsa", {"kv_cache_dtype": "fp8"}, 1, id="dsa-replicated"),
    ],
)
def test_two_ranks_fill_and_read_one_block(
    model: str, args: dict[str, Any], copies: int, gpu_engine: Engine, store: StoreProcess, request: Any
) -> None:
    """copies: how many ranks' bytes one block holds."""
    path: Path = request.getfixturevalue(model)
    args = args | {"tensor_parallel_size": 2, "enforce_eager": True, "disable_log_stats": False}
    with gpu_engine(path, store.endpoint, **args) as llm:
        pinned(llm)
        block = connector_of(llm)._scheduler.block_tokens
        saved = [generate(llm, [ids])[0] for ids in PROMPTS]
        warm = [generate(llm, [ids])[0] for ids in PROMPTS]
        seals_done(llm)
        sums = counters(llm)
        print({name: value for name, value in sums.items() if value})
        per_block = sums["saved_bytes"] // (sums["saved_blocks"] + sums["duplicate_blocks"])
    with gpu_engine(path, store.endpoint, **args) as llm:
        pinned(llm)
        loaded = [generate(llm, [ids])[0] for ids in PROMPTS]
        sums = counters(llm)
        print({name: value for name, value in sums.items() if value})
    blocks = sum((len(ids) - 1) // block for ids in PROMPTS)
    assert [a.cached for a in saved] == [0] * len(PROMPTS)
    assert [a.cached for a in loaded] == [(len(ids) - 1) // block * block for ids in PROMPTS]
    assert sums["loaded_blocks"] == blocks
    assert sums["failed_loads"] == 0
    assert sums["loaded_bytes"] == blocks * per_block * (2 // copies)
    print("own cache against store", [a.distance(b) for a, b in zip(warm, loaded, strict=True)])


@pytest.mark.timeout(900)
def test_sparse_logits_are_as_near_to_stock_as_stock_is_to_itself(
    tiny_dsa: Path, gpu_engine: Engine, start_store: Callable[..., StoreProcess]
) -> None:
    """With each rank fetching for itself, and with each fetching its share."""
    args = arguments_of("fp8-full") | {"tensor_parallel_size": 2, "disable_log_stats": False}
    stock = []
    with gpu_engine(tiny_dsa, **args) as llm:
        prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
        tasks = continued(llm, prompts, STEPS)
        for _ in range(3):
            assert llm.reset_prefix_cache()
            stock.append(together(llm, tasks))
            assert llm.reset_prefix_cache()
            stock.append(one_by_one(llm, tasks))
    results, sums = {}, {}
    for sharded in (False, True):
        own = {"mode": "sparse", "hot_rows": HOT_ROWS, "sharded_fetch": sharded}
        store = start_store("--pool-size", "1GiB")
        more = {"kvsieve": own, "num_gpu_blocks_override": SCARCE_BLOCKS}
        with gpu_engine(tiny_dsa, store.endpoint, **args, **more) as llm:
            pinned(llm)
            mixed = together(llm, tasks)
            seals_done(llm)
            assert llm.reset_prefix_cache()
            alone = one_by_one(llm, tasks)
            seals_done(llm)
            sums[sharded] = counters(llm)
        results[sharded, "all at once"] = compare(mixed, stock)
        results[sharded, "one by one"] = compare(alone, stock)
        for way in ("all at once", "one by one"):
            print(f"= TP 2, sharded {sharded}, {way}: {results[sharded, way]}")
        names = ("lost_blocks", "asked_rows", "hot_rows_hit", "missed_rows", "peer_rows", "late_rows")
        print(f"= TP 2, sharded {sharded}: { ({name: sums[sharded][name] for name in names}) }")
    for found in sums.values():
        assert found["missed_rows"] > 0
        assert found["unplaced_rows"] == 0
    assert sums[False]["peer_rows"] == 0
    assert sums[True]["peer_rows"] > 0
    assert all(result.alike for result in results.values())


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # Earlier tests may have used the device in this process.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def pinned(llm: Any) -> None:
    """Has the workers map and pin the arena, and lets them say so."""
    generate(llm, [prompt(8, 99)], max_tokens=2)
    time.sleep(PINNING_SECONDS)
    generate(llm, [prompt(8, 98)], max_tokens=2)
    assert not connector_of(llm)._scheduler._unready
