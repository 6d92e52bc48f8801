"""GPU memory that the sparse tier takes beside vLLM's pool: summaries of blocks, two staging buffers, tables.

vLLM sizes its pool by what a profiling forward leaves. So that much is held during that forward, and let go
when the caches are registered and the real tensors are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.kernels.block_tables import vectors_of
from kvsieve_connector.sparse.plan import LOADING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_held: torch.Tensor | None = None


def summary_bytes(plan: DensePlan, layers: int, heads: int, dim: int, item: int) -> int:
    """Of all summaries of a rank. item: bytes of a number."""
    vectors = vectors_of(plan.selector, plan.block_tokens)
    return layers * heads * plan.summary_pages * vectors * dim * item


def staging_bytes(plan: DensePlan, heads: int, dim: int, item: int) -> int:
    """Of two contexts of one layer, as long as can be."""
    return 2 * plan.max_blocks * plan.block_tokens * heads * 2 * dim * item


def table_bytes(plan: DensePlan, layers: int, heads: int, rows: int) -> int:
    """Of tables of requests, hot buffers and lists, where so many requests are host-backed as can be. rows:
    most requests of a batch."""
    slots = plan.max_num_seqs + LOADING
    hot = layers * slots * heads * plan.hot_blocks * 8
    return (
        hot + slots * plan.max_blocks * 12 + rows * heads * max(plan.max_blocks, plan.attended_blocks + 1) * 4
    )


def hold_memory(config: VllmConfig | None, heads: int, dim: int) -> None:
    """Takes what the tier will need, once, in a profiling forward."""
    global _held
    if _held is not None or config is None:
        return
    plan = DensePlan.of_config(config)
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    item = model.dtype.itemsize
    rows = max(plan.max_num_seqs, *(config.compilation_config.cudagraph_capture_sizes or [0]))
    size = summary_bytes(plan, layers, heads, dim, item) + staging_bytes(plan, heads, dim, item)
    size += table_bytes(plan, layers, heads, rows)
    _held = torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())


def release_memory() -> None:
    """Lets go of what was held."""
    global _held
    if _held is not None:
        _held = None
        torch.cuda.empty_cache()
