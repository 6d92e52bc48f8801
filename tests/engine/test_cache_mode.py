"""cache mode on a real engine: one engine loads what another saved, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess
from tests.engine.conftest import ENGINE_ARGS
from tests.engine.generate import Answer, connector_of, counters, generate, prompt, seals_done

Engine = Callable[..., AbstractContextManager[Any]]

LENGTHS = [100, 300, 257, 1000]
PROMPTS = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]

MODELS = [
    pytest.param("tiny_qwen3", 32, {}, id="gqa"),
    pytest.param("tiny_qwen3", 32, {"max_num_batched_tokens": 256}, id="gqa-chunked"),
    pytest.param(
        "tiny_qwen3", 32, {"enable_prefix_caching": False, "dtype": "float32"}, id="gqa-no-local-cache"
    ),
    pytest.param("tiny_qwen3", 32, {"dtype": "float32"}, id="gqa-float32"),
    pytest.param("tiny_qwen3", 32, {"kv_cache_dtype": "fp8"}, id="gqa-fp8"),
    pytest.param("tiny_gemma3", 32, {"max_num_batched_tokens": 256}, id="sliding-window"),
    pytest.param("tiny_dsv3", 16, {}, id="mla"),
]


ROUNDING = 1e-3
"""Nats: two engines of one process may differ a little in float32, without any connector, and so may a prompt
computed in one chunk or two. One step of bfloat16 is ten times as much."""


def full_blocks(length: int, block: int) -> int:
    """Tokens of a prompt that can be loaded: whole blocks, and the last token is computed always."""
    return (length - 1) // block * block


def one_by_one(llm: Any) -> list[Answer]:
    """Answers to the prompts, each alone in its batch, so that batches are the same in each run."""
    return [generate(llm, [ids])[0] for ids in PROMPTS]


def together(llm: Any) -> list[Answer]:
    """Answers to the prompts in one batch. Which chunks share a step depends on when the store answers each
    match, and so does the rounding: for float32 only, where that stays below ROUNDING."""
    return generate(llm, PROMPTS)


@pytest.mark.parametrize(("model", "block", "args"), MODELS)
def test_a_second_engine_loads_what_the_first_saved(
    model: str, block: int, args: dict[str, Any], engine: Engine, store: StoreProcess, request: Any
) -> None:
    path: Path = request.getfixturevalue(model)
    dtype = (ENGINE_ARGS[model.replace("_", "-")] | args)["dtype"]
    ask = together if dtype == "float32" else one_by_one
    with engine(path, **args) as llm:
        plain = ask(llm)
        # From the engine's own prefix cache, where it has one: the same chunks and batches as from the store.
        warm, again = one_by_one(llm), one_by_one(llm)
    with engine(path, store.endpoint, **args) as llm:
        saved = ask(llm)
        seals_done(llm)
    with engine(path, store.endpoint, disable_log_stats=False, **args) as llm:
        loaded = one_by_one(llm)
        stats = counters(llm)

    spread = max(a.distance(b) for a, b in zip(warm, again, strict=True))
    assert [a.cached for a in saved] == [0] * len(PROMPTS)
    assert max(a.distance(b) for a, b in zip(plain, saved, strict=True)) <= ROUNDING
    assert [a.cached for a in loaded] == [full_blocks(n, block) for n in LENGTHS]
    assert max(a.distance(b) for a, b in zip(warm, loaded, strict=True)) <= spread + ROUNDING
    assert stats["loaded_blocks"] == sum(full_blocks(n, block) for n in LENGTHS) // block
    assert stats["failed_loads"] == 0


def test_answers_change_when_the_arena_is_corrupted(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """The proof that loaded bytes are used: spoil them, and the answer is another."""
    ids = prompt(500, 3)
    with engine(tiny_qwen3, store.endpoint) as llm:
        good: Answer = generate(llm, [ids])[0]
        seals_done(llm)
        arena = connector_of(llm, "worker")._worker._arena
        for segment in arena.segments:
            segment[arena.attachment.slots_offset : 64 << 20] ^= 0x15
    with engine(tiny_qwen3, store.endpoint) as llm:
        bad = generate(llm, [ids])[0]
    assert bad.cached == full_blocks(500, 32)
    assert bad.distance(good) > 0.01
