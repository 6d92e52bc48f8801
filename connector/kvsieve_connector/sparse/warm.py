"""Warm starts: a request that was preempted gets back the hot rows that it had.

Its tables go with its blocks, and its context is matched in the store when it comes back; without this, each
layer would fetch all of its top-k rows again in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvsieve_connector.device import upload

if TYPE_CHECKING:
    from kvsieve_connector.kernels.swap_in import LayerCache
    from kvsieve_connector.sparse.kernel_set import KernelSet
    from kvsieve_connector.sparse.tables import HostTables

MOST = 64
"""Requests remembered; the oldest is forgotten first."""

MOST_POSITIONS = 8192
"""Positions of one launch: an eighth of them must fit a block's static shared memory (swap_in.cu)."""


class WarmStarts:
    """What the hot buffers of ended requests held, as positions: int32 [layers, H] each, on the device."""

    def __init__(self, caches: Sequence[LayerCache], tables: HostTables, kernels: KernelSet) -> None:
        self._caches, self._tables, self._kernels = caches, tables, kernels
        self._rows: dict[str, torch.Tensor] = {}
        self._waiting: list[str] = []

    def keep(self, req_id: str) -> None:
        """The request's tables are about to go."""
        pages = self._tables.pages_of(req_id)
        if not pages:
            return
        sizes, device = self._tables.sizes, self._tables.tag.device
        block_of = torch.full((sizes.pages,), -1, dtype=torch.int32)
        block_of[list(pages.values())] = torch.tensor(list(pages), dtype=torch.int32)
        tag = self._tables.tag[:, self._tables.slot(req_id)].long()
        blocks = block_of.to(device)[tag.clamp(min=0) // sizes.block_tokens]
        positions = blocks * sizes.block_tokens + tag % sizes.block_tokens
        self._rows[req_id] = torch.where((tag >= 0) & (blocks >= 0), positions, -1).to(torch.int32)
        if len(self._rows) > MOST:
            del self._rows[next(iter(self._rows))]

    def forget(self, req_ids: Iterable[str]) -> None:
        """These have finished: they do not come back."""
        for req_id in req_ids:
            self._rows.pop(req_id, None)

    def resume(self, req_id: str) -> None:
        """The request has tables again, which flush() has yet to write."""
        if req_id in self._rows:
            self._waiting.append(req_id)

    def fetch(self) -> None:
        """Fetches the rows of requests that came back, on the current stream; after flush()."""
        for req_id in self._waiting:
            rows, slot = self._rows.pop(req_id, None), self._tables.slot(req_id)
            if rows is None or slot < 0:
                continue
            alone = replace(self._tables.requests, row_slot=upload([slot], torch.int32, rows.device))
            for cache, parts in zip(self._caches, _parts(rows), strict=True):
                for positions in parts:
                    self._kernels.prefetch(cache, alone, positions.unsqueeze(0))
        self._waiting.clear()


def _parts(rows: torch.Tensor) -> torch.Tensor:
    """int32 [layers, H] in parts of one size, the last one filled up with -1: [layers, parts, positions]."""
    layers, positions = rows.shape
    parts = -(-positions // MOST_POSITIONS)
    size = -(-positions // parts)
    if parts * size > positions:
        rows = torch.cat((rows, rows.new_full((layers, parts * size - positions), -1)), 1)
    return rows.view(layers, parts, size)
