"""What `gather_context` means, in torch on CPU; page_addr holds addresses of this process's memory."""

from __future__ import annotations

import ctypes

import torch

from .gather_context import check_gather
from .tables import LayerCache, RequestTables

__all__ = ["gather_context"]


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
    """As gather_context.gather_context."""
    check_gather(dst, layer, tables, block_table, slots, starts, lengths, staged, staging)
    _, block_tokens, row_bytes = layer.cache.shape
    size = block_tokens * row_bytes
    for i, slot in enumerate(slots.tolist()):
        for first in range(0, int(lengths[i]), block_tokens):
            block = first // block_tokens
            number = int(tables.page[slot, block]) if slot >= 0 else 0
            copy = int(staged[i, block]) if staged is not None and number > 0 else -1
            if number == 0:
                rows = layer.cache[int(block_table[i, block])]
            elif staging is not None and copy >= 0:
                rows = staging[copy, :size].view(block_tokens, row_bytes)
            else:
                address = int(tables.page_addr[number]) + layer.layer_offset
                data = bytearray(ctypes.string_at(address, size))
                rows = torch.frombuffer(data, dtype=torch.uint8).view(block_tokens, row_bytes)
            n = min(block_tokens, int(lengths[i]) - first)
            start = int(starts[i]) + first
            dst[start : start + n] = to_bf16(rows[:n])


def to_bf16(rows: torch.Tensor) -> torch.Tensor:
    """bf16 [n, 576] of uint8 [n, 1152]; or of [n, 656]: 512 e4m3 in 4 tiles, a scale each, 64 bf16."""
    rows = rows.contiguous()
    if rows.shape[1] == 1152:
        return rows.view(torch.bfloat16)
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32).unsqueeze(2)
    tail = rows[:, 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(values * scales).to(torch.bfloat16).view(-1, 512), tail], 1)
