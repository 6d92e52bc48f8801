"""Real vLLM engines in this process, with and without the connector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

# What each model needs on any CPU. Block 32 is the smallest of vLLM's CPU attention; MLA's is 16 and fixed.
# CPU_MLA and -rotary_embedding: the AMX backend has no float32, and the rotary op is wrong for MLA's queries.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {"dtype": "bfloat16", "block_size": 32},
    "tiny-gemma3": {"dtype": "float32", "block_size": 32},
    "tiny-dsv3": {
        "dtype": "float32",
        "attention_backend": "CPU_MLA",
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    },
    "smollm2": {"dtype": "bfloat16", "block_size": 32},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder runs a real engine: marked so, with time for a cold start on busy cores."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


def transfer_config(endpoint: str, **extra: Any) -> dict[str, Any]:
    """--kv-transfer-config for a store; extra: further keys under "kvsieve."."""
    return {
        "kv_connector": "KVSieveConnector",
        "kv_connector_module_path": "kvsieve_connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvsieve.endpoint": endpoint,
            **{f"kvsieve.{k}": v for k, v in extra.items()},
        },
    }


@contextmanager
def run_engine(model: Path, endpoint: str | None = None, **args: Any) -> Iterator[Any]:
    """A vllm.LLM on `model`, with the connector on the store at `endpoint`, or without one.

    args go to vllm.LLM, over the model's ENGINE_ARGS. "kvsieve" holds the connector's own settings.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    # Busy cores answer late; a test that waits for a match must not lose it to that.
    own = {"match_timeout_ms": 20_000} | args.pop("kvsieve", {})
    # Names of folders are NAME-RECIPE.
    settings = ENGINE_ARGS[model.name.rsplit("-", 1)[0]] | {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 128 << 20,
        "seed": 0,
        "disable_log_stats": True,
    }
    if endpoint is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer_config(endpoint, **own))
    with running(LLM, {"model": str(model)} | settings | args) as llm:
        yield llm


@contextmanager
def running(make: Callable[..., Any], settings: dict[str, Any]) -> Iterator[Any]:
    """make(**settings): an engine in this process, shut down at the end."""
    # vLLM collects garbage six times while it starts, and thaws all before it does so at the end: half a
    # second each with all that it imports.
    gc.freeze()
    try:
        llm = make(**settings)
    except BaseException:
        # A start that failed half-way leaves its worker's connector behind, in this process.
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
        raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine() -> Callable[..., AbstractContextManager[Any]]:
    """`with engine(model, endpoint, **LLM arguments) as llm:`; see run_engine."""
    return run_engine
