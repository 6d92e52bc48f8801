"""Makes a worker's runtime of its registered caches."""

from __future__ import annotations

import torch

from kvsieve_connector.copy.base import LayerPages
from kvsieve_connector.dense.gpu.kernel_set import block_kernels
from kvsieve_connector.dense.gpu.runtime import DenseGpuRuntime
from kvsieve_connector.dense.gpu.tables import DenseSizes, DenseTables
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.device import upload
from kvsieve_connector.kernels.block_tables import LayerBlocks, Picks, check_layer, vectors_of
from kvsieve_connector.kernels.summarise import KeySources, check_summarise


def dense_runtime(
    plan: DensePlan,
    layers: list[LayerPages],
    caches: list[torch.Tensor],
    sizes: DenseSizes,
    scale: float,
) -> DenseGpuRuntime:
    """layers, caches: in the order of the model; caches: [num_blocks, H, N, 2 * D]. scale: of the logits.
    Raises ValueError for shapes and dtypes that the kernels can't serve."""
    like = caches[0]
    width = vectors_of(plan.selector, like.shape[2]) * like.shape[3] // 2
    summaries = like.new_zeros((len(layers), sizes.heads, sizes.pages, width))
    tables = DenseTables(sizes, like.device, plan.exact_in_pool)
    blocks = {
        layer.name: LayerBlocks(
            cache=cache,
            layer_offset=layer.offset,
            summaries=summaries[order],
            tag=tables.tag[order],
            stamp=tables.stamp[order],
            clock=tables.clock[order],
            counters=tables.counters[order],
        )
        for order, (layer, cache) in enumerate(zip(layers, caches, strict=True))
    }
    sources = KeySources(
        tuple(caches),
        upload([cache.data_ptr() for cache in caches], torch.int64, like.device),
        upload([layer.offset for layer in layers], torch.int64, like.device),
    )
    nothing = torch.empty(0, dtype=torch.int64, device=like.device)
    check_summarise(sources, plan.selector, nothing, nothing.to(torch.int32), summaries)
    for each in blocks.values():
        check_layer(each, tables.blocks, plan.selector)
    picks = Picks(plan.selector, plan.budget_blocks, plan.first_blocks, plan.window_blocks, scale)
    kernels = block_kernels(like.device)
    return DenseGpuRuntime(picks, tables, blocks, kernels, sources, summaries, sizes.blocks)
