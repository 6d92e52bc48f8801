"""The tensors that dense models' sparse tier works on: what kernels read and write of requests and layers.

Sizes: S table slots, B blocks of a request at most, H KV heads, N tokens of a block, D channels of a head,
P pages of summaries, HB hot blocks. A piece is one KV head's part of a block in a layer: N tokens, a key
and a value each.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .tables import require, require_block_table, require_device, require_tensor

COUNTERS = ("asked_pieces", "pool_pieces", "hot_pieces", "arena_pieces")
"""Sums that pick_blocks adds to: pieces of full blocks that were listed; of these, read where they lie in
vLLM's pool; found in the hot buffer; fetched from the arena."""

SELECTORS = {"quest-bounds": 0, "mean-key": 1, "mean-outlier": 2, "part-means": 3}
"""The kernels' numbers of dense/selectors.py's selectors."""

DTYPES = {torch.bfloat16: 0, torch.float16: 1}

MAX_BLOCKS = 32_768
"""Most blocks of a request. Their scores must fit a multiprocessor's shared memory, too: with many query
heads a KV head there are fewer (pick_blocks.prepare)."""


@dataclass(frozen=True, slots=True)
class Picks:
    """Which full blocks a row attends to: the `first`, the newest `window`, and of the rest the `budget` that
    the selector scores highest. All of them, when there are no more than that. scale: of the logits."""

    selector: str
    budget: int
    first: int
    window: int
    scale: float

    @property
    def listed(self) -> int:
        """Most full blocks that a row attends to."""
        return self.first + self.budget + self.window


@dataclass(frozen=True, eq=False)
class BlockTables:
    """What all layers share.

    row_slot: int32 [R_max], batch row -> table slot, -1: all of the request's blocks are in the pool.
    page: int32 [S, B], page of a block's summary, -1: it has none, and is picked after all that have.
    address: int64 [S, B], address of the block's slot in the mapped, pinned arena; 0: it is in the pool, at
        the block table's place.
    hot_blocks: int32 [S, HB], ids of the pool's blocks that are the request's hot buffer.
    """

    row_slot: torch.Tensor
    page: torch.Tensor
    address: torch.Tensor
    hot_blocks: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerBlocks:
    """One layer's part.

    cache: [num_blocks, H, N, 2 * D], keys before values; a block's pieces follow one another, blocks may lie
        apart, by whole pieces.
    layer_offset: bytes from a slot's base in the arena to this layer's pieces.
    summaries: [H, P, width], of the cache's dtype.
    tag: int32 [S, H, HB], the block that a hot block has for a head, -1: none. Set to -1 for a table slot
        that is assigned anew.
    stamp, clock: int32 [S, H, HB] and [S, H]: when it was last used, and the time. They start at 0.
    counters: int64 [S, len(COUNTERS)], sums per table slot.
    """

    cache: torch.Tensor
    layer_offset: int
    summaries: torch.Tensor
    tag: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    counters: torch.Tensor

    @property
    def piece_bytes(self) -> int:
        return self.cache.shape[2] * self.cache.shape[3] * self.cache.element_size()

    @property
    def stride_pieces(self) -> int:
        """Pieces between two blocks of the pool."""
        return self.cache.stride(0) // (self.cache.shape[2] * self.cache.shape[3])


PART_TOKENS, MOST_PARTS = 4, 16
"""Of part-means: a part has about so many tokens, and a block at most so many parts, which the kernels can
multiply at once."""


def vectors_of(selector: str, block_tokens: int) -> int:
    """Vectors of a summary, each as long as a head has channels: a power of two."""
    if selector == "part-means":
        parts = max(1, min(block_tokens // PART_TOKENS, MOST_PARTS))
        return 1 << parts.bit_length() - 1
    return {"mean-key": 1, "mean-outlier": 2, "quest-bounds": 2}[selector]


_checked: WeakKeyDictionary[LayerBlocks, tuple[BlockTables, str]] = WeakKeyDictionary()
"""With which tables, and for which selector."""


def check_layer(layer: LayerBlocks, tables: BlockTables, selector: str) -> None:
    """Raise ValueError, naming the tensor, where a layer's tensors and the tables do not fit each other."""
    known = _checked.get(layer)
    if known is not None and known[0] is tables and known[1] == selector:
        return
    cache = layer.cache
    require(
        cache.dim() == 4 and cache.dtype in DTYPES,
        f"cache must be bfloat16 or float16 [num_blocks, H, N, 2 * D], got {cache.dtype} {list(cache.shape)}",
    )
    _, heads, tokens, columns = cache.shape
    strides = (tokens * columns, columns, 1)
    require(
        cache.stride()[1:] == strides and cache.stride(0) % strides[0] == 0,
        f"pieces of cache must follow one another, got strides {list(cache.stride())}",
    )
    require(
        columns % 16 == 0
        and layer.layer_offset % 16 == 0
        and cache.data_ptr() % 16 == 0
        and layer.summaries.data_ptr() % 16 == 0,
        f"pieces and summaries must be 16-byte aligned, got {columns} columns, layer_offset "
        f"{layer.layer_offset}",
    )
    require(selector in SELECTORS, f"no selector {selector!r}")
    require_tensor("row_slot", tables.row_slot, torch.int32, (None,))
    require_tensor("page", tables.page, torch.int32, (None, None))
    slots, blocks = tables.page.shape
    require(blocks <= MAX_BLOCKS, f"requests have at most {MAX_BLOCKS} blocks, got {blocks}")
    require_tensor("address", tables.address, torch.int64, (slots, blocks))
    require_tensor("hot_blocks", tables.hot_blocks, torch.int32, (slots, None))
    hot = tables.hot_blocks.shape[1]
    width = vectors_of(selector, tokens) * columns // 2
    require_tensor("summaries", layer.summaries, cache.dtype, (heads, None, width))
    require_tensor("tag", layer.tag, torch.int32, (slots, heads, hot))
    require_tensor("stamp", layer.stamp, torch.int32, (slots, heads, hot))
    require_tensor("clock", layer.clock, torch.int32, (slots, heads))
    require_tensor("counters", layer.counters, torch.int64, (slots, len(COUNTERS)))
    require_device(
        cache.device,
        row_slot=tables.row_slot,
        page=tables.page,
        address=tables.address,
        hot_blocks=tables.hot_blocks,
        summaries=layer.summaries,
        tag=layer.tag,
        stamp=layer.stamp,
        clock=layer.clock,
        counters=layer.counters,
    )
    _checked[layer] = tables, selector


def check_pick(
    layer: LayerBlocks,
    tables: BlockTables,
    picks: Picks,
    query: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    out_lengths: torch.Tensor,
    out_query: torch.Tensor,
) -> None:
    """Raise ValueError where the arguments of pick_blocks do not fit."""
    check_layer(layer, tables, picks.selector)
    heads, dim = layer.cache.shape[1], layer.cache.shape[3] // 2
    hot, blocks = tables.hot_blocks.shape[1], tables.page.shape[1]
    require(
        min(picks.budget, picks.first) >= 0 and picks.window >= 1,
        f"budget {picks.budget} and first {picks.first} must be >= 0, window {picks.window} >= 1",
    )
    require(picks.listed <= hot, f"{picks.listed} blocks a row, but the hot buffer has {hot}")
    require(
        query.dim() == 3
        and query.dtype == layer.cache.dtype
        and query.shape[1] % heads == 0
        and query.shape[2] == dim
        and query.stride()[1:] == (dim, 1)
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0,
        f"query must be {layer.cache.dtype} [R, n * {heads}, {dim}], heads following one another, got "
        f"{query.dtype} {list(query.shape)}, strides {list(query.stride())}",
    )
    rows, group = query.shape[0], query.shape[1] // heads
    limit = tables.row_slot.shape[0]
    require(rows <= limit, f"{rows} batch rows, but row_slot has {limit}")
    require_tensor("lengths", lengths, torch.int32, (rows,))
    require_block_table(block_table, rows)
    require(
        out.dtype == torch.int32
        and out.dim() == 2
        and out.shape[0] == rows * heads
        and out.shape[1] >= max(blocks, picks.listed + 1)
        and out.stride(1) == 1,
        f"out must be int32 [{rows * heads}, >= {max(blocks, picks.listed + 1)}], got {out.dtype} "
        f"{list(out.shape)}",
    )
    require_tensor("out_lengths", out_lengths, torch.int32, (rows * heads,))
    require_tensor("out_query", out_query, query.dtype, (rows * heads, group, dim))
    require_device(
        layer.cache.device,
        query=query,
        lengths=lengths,
        block_table=block_table,
        out=out,
        out_lengths=out_lengths,
        out_query=out_query,
    )
