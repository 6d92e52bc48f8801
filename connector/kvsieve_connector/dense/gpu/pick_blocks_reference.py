"""What `pick_blocks` means, in torch on CPU; addresses are of this process's memory."""

from __future__ import annotations

import ctypes

import torch

from kvsieve_connector.dense.selectors import make_selector, select
from kvsieve_connector.kernels.block_tables import BlockTables, LayerBlocks, Picks, check_pick

__all__ = ["pick_blocks"]


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
    """As pick_blocks.pick_blocks."""
    check_pick(layer, tables, picks, query, lengths, block_table, out, out_lengths, out_query)
    heads, tokens = layer.cache.shape[1:3]
    stride = layer.stride_pieces
    out_query.copy_(query.reshape(out_query.shape))
    for request, length in enumerate(lengths.tolist()):
        slot = int(tables.row_slot[request])
        if slot < 0 and not write_whole:
            continue
        blocks = -(-length // tokens)
        for head in range(heads):
            row = request * heads + head
            if slot < 0:
                out[row, :blocks] = block_table[request, :blocks] * stride + head
                out_lengths[row] = length
                continue
            full = max(length - 1, 0) // tokens
            listed = _listed(layer, tables, picks, out_query[row], slot, head, full)
            for entry, piece in enumerate(_pieces(layer, tables, block_table[request], slot, head, listed)):
                out[row, entry] = piece
            out[row, len(listed)] = int(block_table[request, full]) * stride + head
            out_lengths[row] = (len(listed) - full) * tokens + length


def _listed(
    layer: LayerBlocks,
    tables: BlockTables,
    picks: Picks,
    query: torch.Tensor,
    slot: int,
    head: int,
    full: int,
) -> list[int]:
    """The full blocks of a row and head, ascending."""
    if full <= picks.listed:
        return list(range(full))
    _, _, tokens, columns = layer.cache.shape
    selector = make_selector(picks.selector, columns // 2, tokens, picks.scale)
    pages = tables.page[slot, :full]
    scores = torch.full((full, 1), -torch.inf)
    there = pages >= 0
    if there.any():
        summaries = layer.summaries[head, pages[there].long()].float().unsqueeze(1)
        scores[there] = selector.score(query.unsqueeze(0), summaries)
    found: list[int] = select(scores, picks.budget, picks.first, picks.window)[:, 0].tolist()
    return found


def _pieces(
    layer: LayerBlocks,
    tables: BlockTables,
    block_table: torch.Tensor,
    slot: int,
    head: int,
    listed: list[int],
) -> list[int]:
    """Where the blocks are, in order; what is missing is fetched to the hot blocks used longest ago."""
    stride, size = layer.stride_pieces, layer.piece_bytes
    tag, stamp = layer.tag[slot, head], layer.stamp[slot, head]
    now = int(layer.clock[slot, head]) + 1
    layer.clock[slot, head] = now
    where = {block: hot for hot, block in enumerate(tag.tolist()) if block >= 0}
    in_arena = {block for block in listed if int(tables.address[slot, block])}
    hits = [block for block in listed if block in in_arena and block in where]
    for block in hits:
        stamp[where[block]] = now
    used = {where[block] for block in hits}
    unused = sorted((int(stamp[hot]), hot) for hot in range(len(tag)) if hot not in used)
    missing = [block for block in listed if block in in_arena and block not in where]
    for block, (_, hot) in zip(missing, unused, strict=False):
        tag[hot], stamp[hot], where[block] = block, now, hot
        address = int(tables.address[slot, block]) + layer.layer_offset + head * size
        piece = layer.cache[int(tables.hot_blocks[slot, hot]), head]
        data = bytearray(ctypes.string_at(address, size))
        piece.copy_(torch.frombuffer(data, dtype=layer.cache.dtype).view(piece.shape))
    counts = (len(listed), len(listed) - len(in_arena), len(hits), len(missing))
    layer.counters[slot] += torch.tensor(counts)
    found = []
    for block in listed:
        at = int(tables.hot_blocks[slot, where[block]]) if block in in_arena else int(block_table[block])
        found.append(at * stride + head)
    return found
