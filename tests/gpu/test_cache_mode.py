"""cache mode on stock vLLM with CUDA: dense with full CUDA graphs, a sliding-window hybrid, DSA in fp8."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess
from tests.engine.generate import Answer, connector_of, counters, generate, prompt, seals_done

Engine = Callable[..., AbstractContextManager[Any]]

LENGTHS = [100, 700, 1031, 5000]
PROMPTS = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]

CASES = [
    pytest.param("tiny_qwen3", {}, id="gqa-cuda-graphs"),
    pytest.param("tiny_gemma3", {"dtype": "bfloat16", "enforce_eager": True}, id="sliding-window-eager"),
    pytest.param("tiny_dsa", {"kv_cache_dtype": "fp8", "enforce_eager": True}, id="dsa-fp8-eager"),
]


def arena_ready(llm: Any, timeout: float = 60.0) -> None:
    """Waits until the worker has pinned the arena; until then nothing is saved or loaded."""
    generate(llm, [prompt(8, 99)], max_tokens=2)
    deadline = time.monotonic() + timeout
    while not connector_of(llm, "worker")._worker._ready:
        assert time.monotonic() < deadline, "the arena was not pinned"
        time.sleep(0.05)


@pytest.mark.parametrize(("model", "args"), CASES)
def test_a_second_engine_loads_what_the_first_saved(
    model: str, args: dict[str, Any], gpu_engine: Engine, store: StoreProcess, request: Any
) -> None:
    """Both engines are configured alike: one without a connector is compiled apart and may round so."""
    path: Path = request.getfixturevalue(model)
    with gpu_engine(path, store.endpoint, disable_log_stats=False, **args) as llm:
        arena_ready(llm)
        block = connector_of(llm)._scheduler.block_tokens
        saved = one_by_one(llm)
        warm = one_by_one(llm)  # from the engine's own prefix cache: the same bytes, the same batches
        again = one_by_one(llm)
        seals_done(llm)
        show(llm)
        before = checksums(llm, PROMPTS[3])
    with gpu_engine(path, store.endpoint, disable_log_stats=False, **args) as llm:
        arena_ready(llm)
        loaded = one_by_one(llm)
        sums = show(llm)
        after = checksums(llm, PROMPTS[3])

    blocks = [(n - 1) // block for n in LENGTHS]
    spread = max(a.distance(b) for a, b in zip(warm, again, strict=True))
    distance = max(a.distance(b) for a, b in zip(warm, loaded, strict=True))
    print("= own cache against itself", spread, "store against own cache", distance, "bytes", before == after)
    assert [a.cached for a in saved] == [0] * len(PROMPTS)
    assert [a.cached for a in warm] == [a.cached for a in loaded] == [n * block for n in blocks]
    assert sums["loaded_blocks"] == sum(blocks)
    assert sums["failed_loads"] == 0
    assert before == after, "bytes of the paged cache differ"
    assert distance <= spread


def one_by_one(llm: Any) -> list[Answer]:
    """Answers to the prompts, each alone in its batch, so that batches are the same in each run."""
    return [generate(llm, [ids])[0] for ids in PROMPTS]


def show(llm: Any) -> dict[str, float]:
    """Prints the connector's counters that have moved."""
    sums = counters(llm)
    print({name: value for name, value in sums.items() if value})
    return sums


def checksums(llm: Any, ids: list[int]) -> list[str]:
    """SHA-256 of the pages of each full block of a prompt that the engine has cached, all layers in order."""
    import hashlib

    half, found = connector_of(llm)._scheduler, []
    manager = connector_of(llm)._kv_cache_manager
    finished = half.finished

    def note(request: Any) -> None:
        tables = manager.get_block_ids(request.request_id)
        layers = connector_of(llm, "worker")._worker._engine.layers
        for index in range((len(ids) - 1) // half.block_tokens):
            digest = hashlib.sha256()
            for layer in layers:
                for page in tables[layer.group][index * layer.pages : (index + 1) * layer.pages]:
                    if page:
                        digest.update(layer.view[page].cpu().numpy().tobytes())
            found.append(digest.hexdigest())
        finished(request)

    half.finished = note
    generate(llm, [ids], max_tokens=1)
    half.finished = finished
    return found
