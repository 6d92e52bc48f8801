"""The device's view of which blocks are read from the arena, and of each request's hot buffer.

All decisions are the scheduler's; this keeps count of table slots and pages, and writes tables when they
change: a few small copies a step at most, none in steady state. What the numbers mean: kernels/tables.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvsieve_connector.device import upload
from kvsieve_connector.kernels.tables import COUNTERS, RequestTables

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableSizes:
    """slots: requests that can be host-backed at once. blocks: most blocks of a request. pages: blocks that
    all requests together can read from the arena. groups: main groups. hot_blocks: blocks of a hot buffer.
    layers: main layers. block_tokens: tokens of a block. rows: most requests of a batch, padding included."""

    slots: int
    blocks: int
    pages: int
    groups: int
    hot_blocks: int
    layers: int
    block_tokens: int
    rows: int

    @property
    def bytes(self) -> int:
        """Device memory of the tables."""
        hot_rows = self.hot_blocks * self.block_tokens
        slots = self.slots + 1
        per_layer = 2 * self.pages * self.block_tokens + 8 * slots * (hot_rows + 1)
        return self.layers * per_layer + 4 * slots * self.blocks + 8 * self.pages


@dataclass(slots=True)
class _Place:
    """slot: the request's table slot. pages: block of the request -> page."""

    slot: int
    pages: dict[int, int] = field(default_factory=dict)


class HostTables:
    """One worker's tables. Changes collect until flush(), which puts them on the current stream.

    requests: what the kernels read (RequestTables). slot_of, tag, stamp, clock, counters: the hot buffers'
    state, layers first; a kernel sees one layer's part.
    """

    def __init__(self, sizes: TableSizes, device: torch.device) -> None:
        self.sizes = sizes
        self._device = device
        hot_rows = sizes.hot_blocks * sizes.block_tokens

        def table(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        # Page 0 stands for "on the GPU". The last slot has no pages: it is that of all requests of a batch
        # that are not host-backed.
        slots = sizes.slots + 1
        self.requests = RequestTables(
            row_slot=table(-1, sizes.rows),
            page=table(0, slots, sizes.blocks),
            page_addr=table(0, sizes.pages, dtype=torch.int64),
            hot_blocks=table(0, sizes.groups, slots, sizes.hot_blocks),
        )
        self.slot_of = table(-1, sizes.layers, sizes.pages * sizes.block_tokens, dtype=torch.int16)
        self.tag = table(-1, sizes.layers, slots, hot_rows)
        self.stamp = table(0, sizes.layers, slots, hot_rows)
        self.clock = table(0, sizes.layers, slots, 2)
        self.counters = table(0, sizes.layers, slots, len(COUNTERS), dtype=torch.int64)
        self._places: dict[str, _Place] = {}
        self._free_slots = list(range(sizes.slots - 1, -1, -1))
        self._free_pages = list(range(sizes.pages - 1, 0, -1))
        self._addresses = np.zeros(sizes.pages, np.int64)
        self._new: dict[int, Sequence[Sequence[int]]] = {}
        self._added: list[tuple[int, int, int, int]] = []
        self._rows: list[int] = []
        self._rows_on_device: list[int] | None = None
        self._mark: torch.Tensor | None = None
        self._history = 0

    def mark(self) -> torch.Tensor:
        """int64 [1] on the device, a checksum of what was done to the tables since the first call: equal on
        two ranks, they number slots and pages alike (kernels/tables.py, Peers.mark). flush() writes it."""
        if self._mark is None:
            self._mark = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._mark

    def slot(self, req_id: str) -> int:
        """The request's table slot; -1 for one that is not host-backed."""
        place = self._places.get(req_id)
        return place.slot if place is not None else -1

    def has_pages(self, req_id: str) -> bool:
        """Whether some block of the request is read from the arena."""
        place = self._places.get(req_id)
        return place is not None and bool(place.pages)

    def pages_of(self, req_id: str) -> dict[int, int]:
        """Blocks of the request that are read from the arena, and their pages."""
        place = self._places.get(req_id)
        return place.pages if place is not None else {}

    def host_pages(self, req_id: str) -> tuple[Numbers, Numbers]:
        """The blocks that are read from the arena, int64 [n] each: index in the request, and host address of
        the slot."""
        pages = self.pages_of(req_id)
        indices = np.fromiter(pages.keys(), np.int64, len(pages))
        return indices, self._addresses[np.fromiter(pages.values(), np.int64, len(pages))]

    def begin(self, req_id: str, hot_blocks: Sequence[Sequence[int]]) -> None:
        """The request is host-backed from now on. hot_blocks: per main group, the ids of its hot blocks.

        Raises RuntimeError when it is already, or when the table is full: the scheduler has miscounted.
        """
        if req_id in self._places or not self._free_slots:
            raise RuntimeError(f"kvsieve: no table slot for request {req_id} of {self.sizes.slots}")
        slot = self._free_slots.pop()
        self._places[req_id] = _Place(slot)
        self._new[slot] = hot_blocks
        self._note("begin", req_id, slot, hot_blocks)

    def add(self, req_id: str, blocks: Iterable[tuple[int, int]]) -> None:
        """blocks: (index in the request, host address of its slot), to be read from there from now on."""
        place = self._places[req_id]
        for index, address in blocks:
            if index in place.pages or not self._free_pages:
                raise RuntimeError(f"kvsieve: no page for block {index} of request {req_id}")
            page = place.pages[index] = self._free_pages.pop()
            self._addresses[page] = address
            self._added.append((place.slot, index, page, address))
            self._note("add", place.slot, index, page)

    def end(self, req_id: str) -> None:
        """The request's tables are free again; one that has none is skipped."""
        place = self._places.pop(req_id, None)
        if place is not None:
            self._free_slots.append(place.slot)
            self._free_pages.extend(place.pages.values())
            self._note("end", req_id)
            self._new.pop(place.slot, None)
            self._added = [entry for entry in self._added if entry[0] != place.slot]

    def set_rows(self, req_ids: Sequence[str]) -> None:
        """req_ids: the batch of the next forward, in row order."""
        slots = [self.slot(req_id) for req_id in req_ids]
        self._rows = [slot if slot >= 0 else self.sizes.slots for slot in slots]

    def clear_rows(self) -> None:
        """Graphs that are replayed from now on, without a batch, touch no request's tables."""
        if self._rows_on_device != []:
            self.requests.row_slot.fill_(-1)
            self._rows, self._rows_on_device = [], []

    def flush(self) -> None:
        """Writes what has changed, after all that is queued on the current stream."""
        if self._mark is not None and (self._new or self._added):
            self._mark.fill_(self._history >> 1 << 32)
        if self._new:
            self._reset_slots()
        if self._added:
            self._write_pages()
        if self._rows != self._rows_on_device:
            rows = self._rows + [-1] * (self.sizes.rows - len(self._rows))
            self.requests.row_slot.copy_(upload(rows, torch.int32, self._device), non_blocking=True)
            self._rows_on_device = self._rows

    def _note(self, *what: object) -> None:
        if self._mark is not None:
            self._history = zlib.crc32(repr(what).encode(), self._history)

    def _reset_slots(self) -> None:
        slots = upload(list(self._new), torch.int64, self._device)
        self.requests.page.index_fill_(0, slots, 0)
        self.tag.index_fill_(1, slots, -1)
        self.stamp.index_fill_(1, slots, 0)
        self.clock.index_fill_(1, slots, 0)
        ids = [[list(hot[group]) for hot in self._new.values()] for group in range(self.sizes.groups)]
        self.requests.hot_blocks.index_copy_(1, slots, upload(ids, torch.int32, self._device))
        self._new.clear()

    def _write_pages(self) -> None:
        entries = upload(
            [list(column) for column in zip(*self._added, strict=True)], torch.int64, self._device
        )
        slots, blocks, pages, addresses = entries.unbind()
        self.slot_of.view(self.sizes.layers, self.sizes.pages, -1).index_fill_(1, pages, -1)
        self.requests.page_addr.index_copy_(0, pages, addresses)
        self.requests.page.view(-1).index_copy_(0, slots * self.sizes.blocks + blocks, pages.to(torch.int32))
        self._added.clear()
