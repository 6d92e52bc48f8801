"""Where a layer's page can be cut between KV heads, so that engines of other TP sizes can use the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cuts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec, cache: torch.Tensor
) -> tuple[int, int]:
    """heads and head_runs of a layer (geometry.LayerGeometry).

    cache: [num_blocks * n, heads, tokens, content], as it was given to `register_kv_caches`.
    """
    heads, runs = _heads(vllm_config, kv_cache_config, spec), _runs(spec, cache, kv_cache_config.num_blocks)
    return (heads, runs) if heads and runs else (0, 0)


def _heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec) -> int:
    """Over all ranks; 0 where a rank may hold anything else than an equal part of them, in order, or, with
    more ranks than heads, a copy of one."""
    # Pages of several groups are made to fit one another, and scales of a rank are of its own values.
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) or len(kv_cache_config.kv_cache_groups) > 1:
        return 0
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        return 0
    total: int = vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if (total % ranks and ranks % total) or spec.num_kv_heads != max(1, total // ranks):
        return 0
    return total if spec.max_tp_shards in (None, total) else 0


def _runs(spec: AttentionSpec, cache: torch.Tensor, num_blocks: int) -> int:
    """How often a rank's heads follow one another in a page, each with its bytes in a row; 0 where they lie
    otherwise: inside of tokens, say, or before padding."""
    if cache.dim() != 4 or cache.shape[1] != spec.num_kv_heads or cache.shape[0] % num_blocks:
        return 0
    shown = cache.shape[0] // num_blocks
    sizes, strides = cache.shape[1:], cache.stride()[1:]
    in_order = [sizes[1] * sizes[2], sizes[2], 1]
    if any(n > 1 and a != b for n, a, b in zip(sizes, strides, in_order, strict=True)):
        return 0
    part = cache[0].numel()
    if shown > 1 and cache.stride(0) != part:
        return 0
    return shown if shown * part * cache.element_size() == spec.page_size_bytes else 0
