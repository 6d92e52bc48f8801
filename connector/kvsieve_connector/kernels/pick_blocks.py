"""Picking of one layer: the blocks that a query attends to, per KV head, fetched where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .block_tables import DTYPES, SELECTORS, BlockTables, LayerBlocks, Picks, check_pick, vectors_of
from .compile import launch, load
from .tables import require

__all__ = ["BlockTables", "LayerBlocks", "Picks", "pick_blocks", "prepare"]

CLUSTERS = (8, 4, 2, 1)
"""Thread blocks per batch row and KV head (a cluster)."""

THREADS, RESIDENT = 256, 2
"""Of a thread block, and thread blocks that a multiprocessor takes at once."""

MAX_SHARED, SYSTEM_SHARED = 227 * 1024, 1024
"""Bytes of shared memory that a thread block can have on Hopper, and what each takes beside its own."""


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
    variants, processors = prepare(layer, tables, picks, query.shape[1] // heads)
    variant = choose(variants, rows * heads, processors)
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
    launch(variant.function, (rows * heads * variant.ctas,), THREADS, args, variant.shared)


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernel with so many thread blocks (ctas) a row and head, each of which takes so many bytes of
    shared memory."""

    ctas: int
    shared: int
    function: Any


def choose(variants: Sequence[Variant], clusters: int, processors: int) -> Variant:
    """Of variants, most ctas first, the first one with no more thread blocks than multiprocessors; for more
    rows than that, the last one of which a multiprocessor takes most.

    Not one with two thread blocks for each multiprocessor: clusters must fit the groups that these come in,
    and some of 64 clusters of four wait for the others (one H200: 60 us; of two, 46 us). Where contexts are
    long and rows many, only such ones fit twice.
    """
    for variant in variants:
        if clusters * variant.ctas <= processors:
            return variant
    return max(reversed(variants), key=lambda variant: min(RESIDENT, _fit(variant.shared)))


def _fit(shared: int) -> int:
    """Thread blocks that share a multiprocessor's memory; the system takes some for each."""
    return (MAX_SHARED + SYSTEM_SHARED) // (shared + SYSTEM_SHARED)


_prepared: WeakKeyDictionary[LayerBlocks, tuple[tuple[BlockTables, Picks, int], tuple[Variant, ...], int]] = (
    WeakKeyDictionary()
)
"""For which tables, picks and group; what there is; and the device's multiprocessors."""


def prepare(
    layer: LayerBlocks, tables: BlockTables, picks: Picks, group: int
) -> tuple[tuple[Variant, ...], int]:
    """The kernel for these shapes, compiled, most thread blocks first, and the device's multiprocessors.
    Raises ValueError where it takes too much shared memory: too many blocks of a request, or query heads of a
    KV head."""
    asked = (tables, picks, group)  # tables are equal only to themselves
    known = _prepared.get(layer)
    if known is None or known[0] != asked:
        processors = torch.cuda.get_device_properties(layer.cache.device).multi_processor_count
        known = _prepared[layer] = asked, _variants(layer, tables, picks, group), processors
    return known[1:]


def _variants(layer: LayerBlocks, tables: BlockTables, picks: Picks, group: int) -> tuple[Variant, ...]:
    _, heads, tokens, columns = layer.cache.shape
    blocks, hot = tables.page.shape[1], tables.hot_blocks.shape[1]
    least = _shared_bytes(picks, blocks, hot, group, CLUSTERS[0])
    require(
        least <= MAX_SHARED,
        f"{blocks} blocks a request with {group} query heads a KV head take {least} bytes of shared memory, "
        f"of {MAX_SHARED}; larger blocks are fewer",
    )
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "DIM": columns // 2,
        "BLOCK_TOKENS": tokens,
        "PIECE_BYTES": layer.piece_bytes,
        "SELECTOR": SELECTORS[picks.selector],
        "VECTORS": vectors_of(picks.selector, tokens),
        "FP16": DTYPES[layer.cache.dtype],
        "FIRST": picks.first,
        "BUDGET": picks.budget,
        "WINDOW": picks.window,
        "HOT": hot,
        "MAX_BLOCKS": blocks,
        "THREADS": THREADS,
        "RESIDENT": RESIDENT,
    }
    sizes = [(ctas, _shared_bytes(picks, blocks, hot, group, ctas)) for ctas in CLUSTERS]
    fit = tuple((ctas, shared) for ctas, shared in sizes if shared <= MAX_SHARED)
    return _compiled(fit, tuple(constants.items()))


def _shared_bytes(picks: Picks, blocks: int, hot: int, group: int, ctas: int) -> int:
    """As the kernel's struct Shared has it, and room for its padding."""
    share = -(-blocks // ctas)
    words = 3 * group + 4 * picks.listed + 1 + 4 * hot + 256 + THREADS // 32 + 1 + 6 + blocks
    words += share * (group + 1)
    return 16 * picks.listed + 4 * words + 64


@cache
def _compiled(
    sizes: tuple[tuple[int, int], ...], constants: tuple[tuple[str, int], ...]
) -> tuple[Variant, ...]:
    found = []
    for ctas, shared in sizes:
        function = load("pick_blocks", CTAS=ctas, **dict(constants))
        function.max_dynamic_shared_size_bytes = shared
        found.append(Variant(ctas, shared, function))
    return tuple(found)
