"""The tensors that the kernels work on. They are allocated once: CUDA graphs hold their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

ABSENT = -1
COUNTERS = (
    "asked_rows",
    "gpu_rows",
    "hot_rows_hit",
    "missed_rows",
    "prefetched_rows",
    "prefetched_rows_used",
    "unplaced_rows",
    "swap_in_wait_ns",
    "peer_rows",
    "late_rows",
)
"""What swap-ins count, in rows.

asked_rows: top-k positions, gpu_rows + hot_rows_hit + missed_rows. gpu_rows: read from blocks of the pool.
hot_rows_hit: in the hot buffer. missed_rows: fetched then; of these peer_rows from another rank's hot buffer,
late_rows from the host because the rank that owns them was late. prefetched_rows: fetched ahead.
prefetched_rows_used: of these, asked for by a swap-in before they were displaced, each counted once; they are
among the hits. unplaced_rows: found no place in the hot buffer; stays 0. swap_in_wait_ns: nanoseconds that
swap-ins waited for missing rows.
"""


MAX_PEERS = 32


@dataclass(frozen=True, eq=False)
class Peers:
    """Ranks that hold the same rows of one layer, number their pages alike and run the same swap-ins: each
    fetches the misses that it owns from the host, and reads the others from their owners' hot buffers.

    A rank reads the others' hot buffers until its call ends. So between two calls for a layer each rank has
    to wait until all have ended the first one, as it does in the all-reduce that follows attention.

    rank: this one, of N. places: int64 [N, 3], addresses of each rank's cache, slot_of and flags of the
    layer, as this rank reaches them; caches are of one shape.
    flags: int64 [S, N], the last call that each rank has published, mark + its epoch; written by that rank.
    It starts at 0.
    mark: int64 [1], differs where ranks number pages or table slots differently, and changes when a table
    slot or a page is assigned anew; the lower 32 bits are 0.
    silent: int32 [N], how often in a row each rank was late; it starts at 0, and may be shared by layers.
    patience_ns: how long a rank is waited for; half as long each time that it is late again.
    """

    rank: int
    places: torch.Tensor
    flags: torch.Tensor
    mark: torch.Tensor
    silent: torch.Tensor
    patience_ns: int = 1_000_000


def owner(row: int, peers: int) -> int:
    """The rank, of `peers`, that fetches a page row from the host; neighbouring rows are spread evenly."""
    return ((row * 0x9E3779B1 & 0xFFFFFFFF) * peers) >> 32


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's part.

    cache: uint8 [num_blocks, block_tokens, row_bytes], a view of the paged cache; blocks may lie apart.
    layer_offset: bytes from a slot's base in the arena to this layer's first row.
    group: the layer's main group, the first index of `RequestTables.hot_blocks`.
    slot_of: int16 [M * block_tokens], page row -> hot slot, -1: not on the GPU. The rows of a page that is
        assigned anew are set to -1.
    tag: int32 [S, H], hot slot -> page row, -1: empty. Those of a table slot that is assigned anew are set
        to -1.
    stamp: int32 [S, H], when a hot slot was last used.
    clock: int32 [S, 2], the hand and the time. clock and stamp start at 0, and only the kernels write them.
    counters: int64 [S, len(COUNTERS)], sums per table slot, in the order of COUNTERS.
    peers: the ranks that fetch for one another; None: this one fetches for itself. Prefetches take no notice.
    """

    cache: torch.Tensor
    layer_offset: int
    group: int
    slot_of: torch.Tensor
    tag: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    counters: torch.Tensor
    peers: Peers | None = None


@dataclass(frozen=True, eq=False)
class RequestTables:
    """What all layers share.

    row_slot: int32 [R_max], batch row -> table slot s, -1: padding.
    page: int32 [S, B], page number m of a request's logical block; 0: read the GPU block of the block table.
    page_addr: int64 [M], address of page m's slot in the mapped, pinned arena. Page 0 is not used.
    hot_blocks: int32 [G, S, HB], blocks of the pool that hold the hot buffer: hot slot h is row
        h % block_tokens of block hot_blocks[g, s, h // block_tokens].
    """

    row_slot: torch.Tensor
    page: torch.Tensor
    page_addr: torch.Tensor
    hot_blocks: torch.Tensor


def require(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


def require_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Raise ValueError unless the tensor is contiguous and has this dtype and shape (None: any size)."""
    fits = tensor.dtype == dtype and tensor.dim() == len(shape)
    if not fits or any(want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be {dtype} [{wanted}], got {tensor.dtype} {list(tensor.shape)}")
    require(tensor.is_contiguous(), f"{name} must be contiguous, got strides {list(tensor.stride())}")


def require_block_table(block_table: torch.Tensor, requests: int) -> None:
    """Raise ValueError unless it is int32 [>= requests, *] with contiguous rows."""
    require(
        block_table.dtype == torch.int32
        and block_table.dim() == 2
        and block_table.shape[0] >= requests
        and block_table.stride(1) == 1,
        f"block_table must be int32 [>= {requests}, *] with contiguous rows, got {block_table.dtype} "
        f"{list(block_table.shape)}, strides {list(block_table.stride())}",
    )


def require_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless all are on the device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device}, as the cache is; it is on {tensor.device}")


@lru_cache(maxsize=1024)
def check_layer(layer: LayerCache, tables: RequestTables) -> None:
    """Raise ValueError, naming the tensor, where a layer's tensors and the tables do not fit each other."""
    cache = layer.cache
    require(
        cache.dim() == 3 and cache.dtype == torch.uint8,
        f"cache must be uint8 [num_blocks, block_tokens, row_bytes], got {cache.dtype} {list(cache.shape)}",
    )
    block_tokens, row_bytes = cache.shape[1:]
    stride = cache.stride()
    require(stride[1:] == (row_bytes, 1), f"rows of cache must be contiguous, got strides {list(stride)}")
    require(
        all(n % 16 == 0 for n in (row_bytes, stride[0], layer.layer_offset, cache.data_ptr())),
        f"rows must be 16-byte aligned, got row_bytes {row_bytes}, block stride {stride[0]}, "
        f"layer_offset {layer.layer_offset}, address {cache.data_ptr():#x}",
    )
    require_tensor("page", tables.page, torch.int32, (None, None))
    require_tensor("page_addr", tables.page_addr, torch.int64, (None,))
    require_tensor("row_slot", tables.row_slot, torch.int32, (None,))
    slots, pages = tables.page.shape[0], tables.page_addr.shape[0]
    require_tensor("hot_blocks", tables.hot_blocks, torch.int32, (None, slots, None))
    groups, hot_rows = tables.hot_blocks.shape[0], tables.hot_blocks.shape[2] * block_tokens
    require(0 <= layer.group < groups, f"group must be 0..{groups - 1}, got {layer.group}")
    require(hot_rows <= 32767, f"a hot buffer has at most 32767 rows, got {hot_rows}")
    require_tensor("slot_of", layer.slot_of, torch.int16, (pages * block_tokens,))
    require_tensor("tag", layer.tag, torch.int32, (slots, hot_rows))
    require_tensor("stamp", layer.stamp, torch.int32, (slots, hot_rows))
    require_tensor("clock", layer.clock, torch.int32, (slots, 2))
    require_tensor("counters", layer.counters, torch.int64, (slots, len(COUNTERS)))
    require_device(
        cache.device,
        slot_of=layer.slot_of,
        tag=layer.tag,
        stamp=layer.stamp,
        clock=layer.clock,
        counters=layer.counters,
        row_slot=tables.row_slot,
        page=tables.page,
        page_addr=tables.page_addr,
        hot_blocks=tables.hot_blocks,
    )
    if layer.peers is not None:
        _check_peers(layer.peers, slots, cache.device)


def _check_peers(peers: Peers, slots: int, device: torch.device) -> None:
    count = peers.places.shape[0]
    require(2 <= count <= MAX_PEERS, f"peers must be 2..{MAX_PEERS}, got {count}")
    require(0 <= peers.rank < count, f"rank must be 0..{count - 1}, got {peers.rank}")
    require(peers.patience_ns >= 0, f"patience_ns must be >= 0, got {peers.patience_ns}")
    require_tensor("places", peers.places, torch.int64, (count, 3))
    require_tensor("flags", peers.flags, torch.int64, (slots, count))
    require_tensor("mark", peers.mark, torch.int64, (1,))
    require_tensor("silent", peers.silent, torch.int32, (count,))
    require_device(device, places=peers.places, flags=peers.flags, mark=peers.mark, silent=peers.silent)


def check_swap_in(
    layer: LayerCache,
    tables: RequestTables,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    query_tokens: int,
) -> None:
    """Raise ValueError where the arguments of swap_in do not fit."""
    check_layer(layer, tables)
    require_tensor("topk", topk, torch.int32, (None, None))
    rows, k = topk.shape
    require_tensor("out", out, torch.int32, (rows, k))
    require(
        query_tokens >= 1 and rows % query_tokens == 0,
        f"topk has {rows} rows, not a multiple of query_tokens {query_tokens}",
    )
    requests, hot_rows = rows // query_tokens, layer.tag.shape[1]
    require(
        query_tokens * k <= hot_rows,
        f"the hot buffer has {hot_rows} rows, fewer than query_tokens * k = {query_tokens * k}",
    )
    limit = tables.row_slot.shape[0]
    require(requests <= limit, f"{requests} batch rows, but row_slot has {limit}")
    require_block_table(block_table, requests)
    if counts is not None:
        require_tensor("counts", counts, torch.int32, (rows,))
    require_device(layer.cache.device, topk=topk, out=out, block_table=block_table, counts=counts)


def check_prefetch(layer: LayerCache, tables: RequestTables, positions: torch.Tensor) -> None:
    """Raise ValueError where the arguments of prefetch do not fit."""
    check_layer(layer, tables)
    require_tensor("positions", positions, torch.int32, (None, None))
    (requests, n), limit = positions.shape, tables.row_slot.shape[0]
    require(requests <= limit, f"{requests} batch rows, but row_slot has {limit}")
    hot_rows = layer.tag.shape[1]
    require(n <= hot_rows, f"{n} positions a request, but the hot buffer has {hot_rows} rows")
    require_device(layer.cache.device, positions=positions)
