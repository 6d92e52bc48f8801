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

Engine = Callable[..., AbstractContextManager[Any]]

PROMPTS = [prompt(n, seed) for seed, n in enumerate([300, 1031, 5000])]
PINNING_SECONDS = 10
"""Far more than two workers need to pin 256 MiB; they live in processes of their own and can't be asked."""


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
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
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


def pinned(llm: Any) -> None:
    """Has the workers map and pin the arena, and lets them say so."""
    generate(llm, [prompt(8, 99)], max_tokens=2)
    time.sleep(PINNING_SECONDS)
    generate(llm, [prompt(8, 98)], max_tokens=2)
    assert not connector_of(llm)._scheduler._unready
