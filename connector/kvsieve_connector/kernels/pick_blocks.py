"""Picking of one layer: the blocks that a query attends to, per KV head, fetched where they are missing."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from .block_tables import DTYPES, SELECTORS, BlockTables, LayerBlocks, Picks, check_pick
from .compile import launch, load
from .tables import require

__all__ = ["BlockTables", "LayerBlocks", "Picks", "pick_blocks", "prepare"]

CTAS, THREADS = 8, 256
"""Blocks per batch row and KV head (a cluster), and their threads."""

MAX_SHARED = 227 * 1024
"""Shared memory that a thread block can have on Hopper."""


def pick_blocks(
    layer: LayerBlocks,
    tables: BlockTables,
    picks: Picks,
    query: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    out_lengths: torch.Tensor,
    out_query: torch.Tensor,
    *,
    write_whole: bool,
) -> None:
    """Write a block table for each batch row and KV head, all of whose blocks are on the GPU afterwards.

    A row is a request's newest token, whose key and value are in the cache already. Its list: the full blocks
    that `picks` says, ascending, and the block that has the newest token. A row of table slot -1 lists all of
    its blocks, as they are in the pool; that is done only where write_whole says so, as it is the same for
    all layers. One launch, no allocation, no host synchronisation; the grid depends on shapes alone: it may
    be captured in a CUDA graph, after prepare().

    query: [R, H * group, D], any stride between rows. lengths: int32 [R], tokens of the row's context, the
        newest included; 0 for padding. block_table: int32 [R, B'].
    out: int32 [R * H, >= B]: pieces of the cache, counted from the layer's first. Entries past a row's length
        are left as they are.
    out_lengths: int32 [R * H], tokens that the list has.
    out_query: [R * H, group, D], the query once more, contiguous.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_pick(layer, tables, picks, query, lengths, block_table, out, out_lengths, out_query)
    require(layer.cache.is_cuda, f"the kernel needs CUDA tensors, got {layer.cache.device}")
    rows, heads = query.shape[0], layer.cache.shape[1]
    if rows == 0:
        return
    function, shared = prepare(layer, tables, picks, query.shape[1] // heads)
    args = (
        query,
        np.int64(query.stride(0)),
        lengths,
        block_table,
        np.int32(block_table.stride(0)),
        tables.row_slot,
        tables.page,
        tables.address,
        tables.hot_blocks,
        layer.cache,
        np.int32(layer.stride_pieces),
        np.int64(layer.layer_offset),
        layer.summaries,
        np.int32(layer.summaries.shape[1]),
        layer.tag,
        layer.stamp,
        layer.clock,
        layer.counters,
        out,
        np.int32(out.stride(0)),
        out_lengths,
        out_query,
        np.float32(picks.scale),
        np.int32(write_whole),
    )
    launch(function, (rows * heads * CTAS,), THREADS, args, shared)


def prepare(layer: LayerBlocks, tables: BlockTables, picks: Picks, group: int) -> tuple[Any, int]:
    """The kernel for these shapes, compiled, and the shared memory that it takes. Raises ValueError where
    that is too much: too many blocks of a request, or query heads of a KV head."""
    _, heads, tokens, columns = layer.cache.shape
    blocks, hot = tables.page.shape[1], tables.hot_blocks.shape[1]
    shared = _shared_bytes(picks, blocks, hot, group)
    require(
        shared <= MAX_SHARED,
        f"{blocks} blocks a request with {group} query heads a KV head take {shared} bytes of shared memory, "
        f"of {MAX_SHARED}; larger blocks are fewer",
    )
    function = _load(
        HEADS=heads,
        GROUP=group,
        DIM=columns // 2,
        BLOCK_TOKENS=tokens,
        PIECE_BYTES=layer.piece_bytes,
        SELECTOR=SELECTORS[picks.selector],
        FP16=DTYPES[layer.cache.dtype],
        FIRST=picks.first,
        BUDGET=picks.budget,
        WINDOW=picks.window,
        HOT=hot,
        MAX_BLOCKS=blocks,
        CTAS=CTAS,
        THREADS=THREADS,
        LANES=_lanes(group, columns // 2),
    )
    return function, shared


def _lanes(group: int, dim: int) -> int:
    """Lanes that share a block: a lane's part of the query is about 32 numbers, in whole 16-byte loads."""
    lanes = 1
    while lanes < 32 and group * dim > 32 * lanes and dim % (16 * lanes) == 0:
        lanes *= 2
    return lanes


def _shared_bytes(picks: Picks, blocks: int, hot: int, group: int) -> int:
    """As the kernel's struct Shared has it, and room for its padding."""
    share = -(-blocks // CTAS)
    words = 3 * group + 4 * picks.listed + 1 + 4 * hot + 256 + THREADS // 32 + 1 + 6 + blocks
    words += share * (group + 1)
    return 16 * picks.listed + 4 * words + 64


@cache
def _load(**constants: int) -> Any:
    function = load("pick_blocks", **constants)
    function.max_dynamic_shared_size_bytes = MAX_SHARED
    return function
