"""Stock vLLM on a CUDA device. `pytest tests/gpu` on a GPU host with vllm >= 0.33; skipped elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODEL_CACHE, ROOT
from tests.engine.conftest import running, transfer_config


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))
    if here and not has_cuda():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@contextmanager
def run_gpu_engine(model: Path, endpoint: str | None = None, **args: Any) -> Iterator[Any]:
    """A vllm.LLM on the device, with the connector on the store at `endpoint`, or without one."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.2,  # asked for, not taken: other tests may share the device
        "seed": 0,
        "skip_tokenizer_init": True,
    }
    own = {"match_timeout_ms": 20_000, "connect_timeout_ms": 20_000} | args.pop("kvsieve", {})
    if endpoint is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer_config(endpoint, **own))
    _forget_graph_pool()
    with running(LLM, {"model": str(model)} | settings | args) as llm:
        yield llm


def _forget_graph_pool() -> None:
    """vLLM keeps one pool of CUDA graphs per process; torch refuses it once an engine's graphs are gone."""
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


@pytest.fixture
def gpu_engine() -> Callable[..., AbstractContextManager[Any]]:
    return run_gpu_engine


@pytest.fixture(scope="session")
def tiny_dsa() -> Path:
    """DeepSeek-V3.2 in small: MLA latent and indexer caches of the real shapes, 4 layers, random weights."""
    return _made("tiny-dsa")


@pytest.fixture(scope="session")
def tiny_dsa_mtp() -> Path:
    """The same with an MTP layer, whose drafts are right about half of the time."""
    return _made("tiny-dsa-mtp", "--drafter")


@pytest.fixture(scope="session")
def tiny_dense() -> Path:
    """A Llama of 4 layers with 8 KV heads of 128 channels, random weights."""
    return _made("tiny-dense", maker="make_dense.py")


def _made(name: str, *flags: str, maker: str = "make_dsa.py") -> Path:
    """The maker's model, made once."""
    path = MODEL_CACHE / name
    if not (path / "config.json").exists():
        script = ROOT / "tests" / "gpu" / maker
        subprocess.run([sys.executable, str(script), str(path), *flags], check=True)
    return path
