"""Swap-in of one layer: from top-k positions to rows of its cache, fetching from the host what is missing."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from .compile import launch, load
from .tables import LayerCache, Peers, RequestTables, check_prefetch, check_swap_in, require

__all__ = ["LayerCache", "Peers", "RequestTables", "prefetch", "swap_in"]


CTAS, THREADS, ROWS = 8, 256, 8
"""Blocks per batch row (a cluster), threads per block, rows in flight per warp: the best shape at batch 1 to
32 on an H200 (docs/decisions/0013-swap-in-kernel.md)."""


def swap_in(
    layer: LayerCache,
    tables: RequestTables,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    query_tokens: int,
    stride_rows: int,
) -> None:
    """Make every row that the positions name present on the GPU, and say where it is.

    One launch, no allocation, no host synchronisation; the grid depends on shapes alone: it may be captured
    in a CUDA graph, after one call outside of it (which compiles).

    topk: int32 [T, k] positions, -1: none; row t belongs to batch row r = t // query_tokens. The positions of
        a row are distinct; those of different rows may be the same.
    block_table: int32 [R, B'] of the layer's group, with any stride between rows.
    out: int32 [T, k]: block * stride_rows + row in the block; -1 where topk is.
    counts: int32 [T], entries of a row that are >= 0; or None.
    Batch rows of table slot -1 get out -1 and counts 0.
    With layer.peers it waits on the device for the other ranks' calls, for patience_ns at most.
    Raises ValueError if shapes, dtypes or devices do not fit, or the hot buffer has fewer rows than
    query_tokens * k.
    """
    check_swap_in(layer, tables, topk, block_table, out, counts, query_tokens)
    cache = layer.cache
    key = (topk.shape[1], query_tokens, layer.tag.shape[1], cache.shape[2], cache.shape[1])
    table = (block_table, np.int32(block_table.stride(0)))
    _launch(layer, tables, key, topk, (*table, out, counts, np.int32(stride_rows)), layer.peers)


def prefetch(layer: LayerCache, tables: RequestTables, positions: torch.Tensor) -> None:
    """Make rows present that a later swap_in may ask for.

    positions: int32 [R, n], -1: none; n <= H. A row is left out if every slot was used by the last swap_in or
    a prefetch since. Not to run at the same time as another call for this layer.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_prefetch(layer, tables, positions)
    cache = layer.cache
    key = (positions.shape[1], 1, layer.tag.shape[1], cache.shape[2], cache.shape[1])
    _launch(layer, tables, key, positions, (None, np.int32(0), None, None, np.int32(0)), None, prefetch=True)


@cache
def _load(
    topk: int,
    query_tokens: int,
    hot_rows: int,
    row_bytes: int,
    block_tokens: int,
    prefetch: bool,
    peers: int,
) -> Any:
    return load(
        "swap_in",
        TOPK=topk,
        QUERY_TOKENS=query_tokens,
        HOT_ROWS=hot_rows,
        ROW_BYTES=row_bytes,
        BLOCK_TOKENS=block_tokens,
        CTAS=CTAS,
        THREADS=THREADS,
        ROWS=ROWS,
        PREFETCH=int(prefetch),
        PEERS=peers,
    )


def _launch(
    layer: LayerCache,
    tables: RequestTables,
    key: tuple[int, int, int, int, int],
    positions: torch.Tensor,
    outputs: tuple[Any, ...],
    peers: Peers | None,
    *,
    prefetch: bool = False,
) -> None:
    cache = layer.cache
    require(cache.is_cuda, f"the kernel needs CUDA tensors, got {cache.device}")
    requests = positions.shape[0] // key[1]
    if requests == 0 or positions.shape[1] == 0:
        return
    args: tuple[Any, ...] = (
        positions,
        *outputs,
        tables.row_slot,
        tables.page,
        np.int32(tables.page.shape[1]),
        tables.page_addr,
        tables.hot_blocks[layer.group],
        cache,
        np.int64(cache.stride(0)),
        np.int64(layer.layer_offset),
        layer.slot_of,
        layer.tag,
        layer.stamp,
        layer.clock,
        layer.counters,
    )
    count = 1
    if peers is not None:
        count = peers.places.shape[0]
        args += (
            np.int32(peers.rank),
            peers.places,
            peers.flags,
            peers.mark,
            peers.silent,
            np.uint64(peers.patience_ns),
        )
    launch(_load(*key, prefetch, count), (requests * CTAS,), THREADS, args)
