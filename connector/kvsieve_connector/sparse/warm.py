"""Warm starts: a request that begins with blocks of the store gets the rows that were hot where they ended.

They are those of a request that has finished or was preempted, perhaps in another engine (hints.py); without
them, each layer would fetch all of its top-k rows anew in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvsieve_connector.device import upload
from kvsieve_connector.kernels.swap_in_reference import PREFETCHED

if TYPE_CHECKING:
    from kvsieve_connector.kernels.swap_in import LayerCache
    from kvsieve_connector.sparse.kernel_set import KernelSet
    from kvsieve_connector.sparse.tables import HostTables

MOST_POSITIONS = 8192
"""Positions of one launch: an eighth of them must fit a block's static shared memory (swap_in.cu)."""


class WarmStarts:
    """What hot buffers hold, as positions: int32 [layers, H], -1 for none."""

    def __init__(self, caches: Sequence[LayerCache], tables: HostTables, kernels: KernelSet) -> None:
        self._caches, self._tables, self._kernels = caches, tables, kernels
        self._waiting: list[tuple[str, torch.Tensor]] = []

    def hot_rows(self, req_id: str) -> torch.Tensor | None:
        """Those of a request, the last used first; on the device, in the order of the current stream. None
        for one that reads nothing from the arena."""
        if not self._tables.has_pages(req_id):
            return None
        sizes, slot = self._tables.sizes, self._tables.slot(req_id)
        pages = self._tables.requests.page[slot].long()
        block_of = torch.full((sizes.pages,), -1, dtype=torch.int32, device=pages.device)
        block_of.scatter_(0, pages, torch.arange(len(pages), dtype=torch.int32, device=pages.device))
        block_of[:1] = -1  # the page of blocks that are on the GPU
        tag = self._tables.tag[:, slot]
        blocks = block_of[tag.clamp(min=0).long() // sizes.block_tokens]
        rows = torch.where(
            (tag >= 0) & (blocks >= 0), blocks * sizes.block_tokens + tag % sizes.block_tokens, -1
        )
        used = torch.where(rows >= 0, self._tables.stamp[:, slot] & ~PREFETCHED, -1)
        return rows.gather(1, used.argsort(1, descending=True)).to(torch.int32)

    def resume(self, req_id: str, rows: torch.Tensor) -> None:
        """These rows of the request are to be fetched; at most as many as a hot buffer has. What is not in
        the arena is left out."""
        self._waiting.append((req_id, rows))

    def fetch(self) -> None:
        """Fetches what is waited for, on the current stream; after the tables' flush()."""
        for req_id, rows in self._waiting:
            if (slot := self._tables.slot(req_id)) < 0:
                continue
            alone = replace(self._tables.requests, row_slot=upload([slot], torch.int32, rows.device))
            for cache, parts in zip(self._caches, _parts(rows), strict=True):
                for positions in parts:
                    self._kernels.prefetch(cache, alone, positions.unsqueeze(0))
        self._waiting.clear()


@dataclass(frozen=True, eq=False, slots=True)
class RowsCopy:
    """Hot rows on their way to the host. job, slot: of the order. rows: int32 [layers, H], pinned."""

    job: int
    slot: int
    rows: torch.Tensor
    done: torch.cuda.Event | None


class RowsCopies:
    """Copies hot rows from the device to the host; nothing waits for them."""

    def __init__(self) -> None:
        self._copies: list[RowsCopy] = []

    def start(self, job: int, slot: int, rows: torch.Tensor) -> None:
        """rows: on the device, in the order of the current stream."""
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        pinned.copy_(rows, non_blocking=True)
        done = torch.cuda.Event() if rows.is_cuda else None
        if done is not None:
            done.record(torch.cuda.current_stream(rows.device))
        self._copies.append(RowsCopy(job, slot, pinned, done))

    def landed(self) -> list[RowsCopy]:
        """Copies that have ended, each once."""
        ended = []
        while self._copies and ((done := self._copies[0].done) is None or done.query()):
            ended.append(self._copies.pop(0))
        return ended

    def forget(self) -> None:
        """Nobody wants those that are under way any more."""
        self._copies.clear()


def _parts(rows: torch.Tensor) -> torch.Tensor:
    """int32 [layers, H] in parts of one size, the last one filled up with -1: [layers, parts, positions]."""
    layers, positions = rows.shape
    parts = -(-positions // MOST_POSITIONS)
    size = -(-positions // parts)
    if parts * size > positions:
        rows = torch.cat((rows, rows.new_full((layers, parts * size - positions), -1)), 1)
    return rows.view(layers, parts, size)
