"""What makes two engines' blocks the same: the pool's spec, of vLLM's configuration and the caches."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvsieve_connector.geometry import LayerGeometry, WorkerGeometry, pool_spec
from kvsieve_store.protocol.spec import PoolSpec


def spec_of(path: Path, *, tp: int = 1, replicated: bool = False, **more: Any) -> PoolSpec:
    model = SimpleNamespace(
        model=str(path),
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
        dtype="torch.bfloat16",
        quantization=None,
        revision=None,
        seed=0,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        load_config=SimpleNamespace(load_format="auto"),
    )
    layer = LayerGeometry(
        name="layers.0.attn", plane="main", group=0, page_bytes=4096, pages=1, replicated=replicated
    )
    return pool_spec(config, WorkerGeometry(16, "BLHNC", (layer,)), "0", **more)  # type: ignore[arg-type]


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """One model on two hosts: another path, other times."""
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        os.utime(folder / "model.safetensors", ns=(number, number))
        found.append(folder)
    return found


def test_a_model_is_its_path_and_its_files(copies: list[Path]) -> None:
    first = spec_of(copies[0])
    assert first == spec_of(copies[0])
    assert first.name == str(copies[0])
    assert first.model != spec_of(copies[1]).model
    os.utime(copies[0] / "model.safetensors", ns=(7, 7))
    assert first.model != spec_of(copies[0]).model


def test_copies_of_a_model_are_one_under_one_id(copies: list[Path]) -> None:
    one, other = (spec_of(path, model_id="m@1") for path in copies)
    assert one == other
    assert one.pool_id() == other.pool_id()
    assert one.name == "m@1"
    assert spec_of(copies[0], model_id="m@2").pool_id() != one.pool_id()
    assert spec_of(copies[0], model_id="m@1", name="p").name == "p"


def test_approximate_attention_has_pools_of_its_own(copies: list[Path]) -> None:
    """What it decodes are other keys and values, under the same hashes."""
    exact, one, other = (spec_of(copies[0], attention=text) for text in ("", "quest 32", "quest 64"))
    assert len({exact.pool_id(), one.pool_id(), other.pool_id()}) == 3
    assert len({exact.name, one.name, other.name}) == 3
    assert spec_of(copies[0], attention="quest 32", name="p").name == "p"
    assert len(spec_of(copies[0], attention="quest 32", model_id="m" * 256).name) == 256


def test_the_tp_size_counts_only_where_heads_are_split(copies: list[Path]) -> None:
    whole = [spec_of(copies[0], tp=tp, replicated=True) for tp in (1, 2, 8)]
    assert whole[0] == whole[1] == whole[2]
    split = [spec_of(copies[0], tp=tp) for tp in (1, 2)]
    assert [spec.tp_size for spec in split] == [1, 2]
    assert split[0].pool_id() != split[1].pool_id()
