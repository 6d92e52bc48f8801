"""The whole context of one layer in one bf16 workspace, wherever its rows are."""

from __future__ import annotations

import numpy as np
import torch

from .compile import launch, load
from .tables import (
    LayerCache,
    RequestTables,
    check_layer,
    require,
    require_block_table,
    require_device,
    require_tensor,
)

__all__ = ["gather_context"]

ROW_BYTES = (656, 1152)  # fp8_ds_mla; bf16
THREADS, TOKENS, BLOCKS = 256, 4, 264  # blocks: two for each multiprocessor of an H100 or H200


def gather_context(
    dst: torch.Tensor,
    layer: LayerCache,
    tables: RequestTables,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    staged: torch.Tensor | None = None,
    staging: torch.Tensor | None = None,
) -> None:
    """Write token j of request i to dst[starts[i] + j].

    A row comes from the GPU block where the page number is 0, else from staging page staged[i, b] if that is
    >= 0, else from the host. fp8_ds_mla rows are converted as vLLM's cp_gather_and_upconvert_fp8_kv_cache
    does.

    dst: bf16 [N, 576]. block_table: int32 [n, B'], with any stride between rows. slots: int32 [n], table slot
    of a request, -1: all of it is on the GPU. starts, lengths: int32 [n], rows of dst, and tokens. staged:
    int32 [n, B''] and staging: uint8 [P, bytes], bytes >= block_tokens * row_bytes; both or neither.
    One launch, no host synchronisation.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_gather(dst, layer, tables, block_table, slots, starts, lengths, staged, staging)
    cache = layer.cache
    require(cache.is_cuda, f"the kernel needs CUDA tensors, got {cache.device}")
    requests = slots.shape[0]
    if requests == 0:
        return
    function = load(
        "gather_context",
        ROW_BYTES=cache.shape[2],
        BLOCK_TOKENS=cache.shape[1],
        THREADS=THREADS,
        TOKENS=TOKENS,
    )
    args = (
        dst,
        cache,
        np.int64(cache.stride(0)),
        np.int64(layer.layer_offset),
        block_table,
        np.int32(block_table.stride(0)),
        slots,
        starts,
        lengths,
        tables.page,
        np.int32(tables.page.shape[1]),
        tables.page_addr,
        staged,
        np.int32(0 if staged is None else staged.shape[1]),
        staging,
        np.int64(0 if staging is None else staging.shape[1]),
    )
    launch(function, (max(1, BLOCKS // requests), requests), THREADS, args)


def check_gather(
    dst: torch.Tensor,
    layer: LayerCache,
    tables: RequestTables,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    staged: torch.Tensor | None,
    staging: torch.Tensor | None,
) -> None:
    """Raise ValueError where the arguments of gather_context do not fit."""
    check_layer(layer, tables)
    _, block_tokens, row_bytes = layer.cache.shape
    require(row_bytes in ROW_BYTES, f"rows must have 656 (fp8_ds_mla) or 1152 (bf16) bytes, got {row_bytes}")
    require_tensor("dst", dst, torch.bfloat16, (None, 576))
    require_tensor("slots", slots, torch.int32, (None,))
    requests = slots.shape[0]
    require_tensor("starts", starts, torch.int32, (requests,))
    require_tensor("lengths", lengths, torch.int32, (requests,))
    require_block_table(block_table, requests)
    require((staged is None) == (staging is None), "staged and staging go together: give both or neither")
    if staged is not None and staging is not None:
        require_tensor("staged", staged, torch.int32, (requests, None))
        require_tensor("staging", staging, torch.uint8, (None, None))
        need = block_tokens * row_bytes
        require(
            staging.shape[1] >= need and staging.shape[1] % 16 == 0,
            f"a staging page must have >= {need} bytes, a multiple of 16; got {staging.shape[1]}",
        )
    require_device(
        layer.cache.device,
        dst=dst,
        block_table=block_table,
        slots=slots,
        starts=starts,
        lengths=lengths,
        staged=staged,
        staging=staging,
    )
