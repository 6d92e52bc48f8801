"""Where pages can be cut between heads: told from the specs and the real strides of the caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
)

from kvsieve_connector.geometry import LayerGeometry, WorkerGeometry
from kvsieve_connector.heads import cuts

BLOCKS, TOKENS, CONTENT = 5, 32, 128


def spec(heads: int, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=CONTENT // 2, dtype=torch.float32, **more
    )


def cache(heads: int, *, shown: int = 1, inside: bool = False, layers: int = 1) -> torch.Tensor:
    """[BLOCKS * shown, heads, TOKENS / shown, CONTENT]. inside: heads lie inside of tokens. layers: lie side
    by side in each block."""
    tokens = TOKENS // shown
    shape = (tokens, heads, CONTENT) if inside else (heads, tokens, CONTENT)
    whole = torch.zeros(BLOCKS, layers, shown, *shape)[:, 0]
    pages = whole.flatten(0, 1) if layers == 1 else whole[:, 0]
    return pages.transpose(1, 2) if inside else pages


def found(tp: int, total: int, spec: AttentionSpec, cache: torch.Tensor, groups: int = 1) -> tuple[int, int]:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
    )
    caches: Any = SimpleNamespace(kv_cache_groups=[None] * groups, num_blocks=BLOCKS)
    return cuts(config, caches, spec, cache)


@pytest.mark.parametrize(("tp", "mine"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_outside_of_tokens_can_be_cut(tp: int, mine: int) -> None:
    assert found(tp, 8, spec(mine), cache(mine)) == (8, 1)
    assert found(tp, 8, spec(mine), cache(mine, layers=3)) == (8, 1)
    assert found(tp, 8, spec(mine), cache(mine, shown=2)) == (8, 2)


REFUSED = {
    "heads inside of tokens": lambda: found(2, 8, spec(4), cache(4, inside=True)),
    "another number of heads": lambda: found(2, 8, spec(2), cache(2)),
    "ranks that share no equal parts": lambda: found(3, 8, spec(2), cache(2)),
    "several groups": lambda: found(2, 8, spec(4), cache(4), groups=2),
    "scales": lambda: found(2, 8, spec(4, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), cache(4)),
    "padding": lambda: found(2, 8, spec(4, page_size_padded=1 << 20), cache(4)),
    "slots that are no heads": lambda: found(2, 8, spec(4, num_head_slots=2), cache(2)),
    "more dimensions": lambda: found(2, 8, spec(4), cache(4).view(BLOCKS, 4, TOKENS, 2, -1)),
    "other shards": lambda: found(2, 8, spec(4, max_tp_shards=1), cache(4)),
    "latents": lambda: found(
        1,
        1,
        MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=CONTENT, dtype=torch.float32),
        cache(1),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_can_not_be_cut(why: str) -> None:
    assert REFUSED[why]() == (0, 0)


def test_a_plane_is_cut_only_where_all_its_layers_can_be() -> None:
    layer = LayerGeometry("0", "main", 0, 8192, 2, replicated=False, heads=8, head_runs=1)
    other = replace(layer, name="1", heads=4)
    none = replace(layer, name="2", heads=0, head_runs=0)
    for layers, heads in (((layer, layer), (8, 2)), ((layer, other), (0, 0)), ((layer, none), (0, 0))):
        (plane,) = WorkerGeometry(64, "x", layers).planes(2)
        assert (plane.heads, plane.head_runs) == heads
