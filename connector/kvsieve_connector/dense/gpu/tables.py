"""The device's view of the host-backed requests: where their blocks are, their hot buffers, their summaries.

All decisions are the scheduler's; this keeps count of table slots and of pages for summaries, and writes
tables when they change: a few small copies a step at most. What the numbers mean: kernels/block_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvsieve_connector.device import upload
from kvsieve_connector.kernels.block_tables import COUNTERS, BlockTables

I64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """slots: requests that can be host-backed at once. blocks: most blocks of a request. pages: blocks of all
    of them that can have summaries. hot_blocks: blocks of a hot buffer. layers, heads: of this rank. rows:
    most requests of a batch, padding included."""

    slots: int
    blocks: int
    pages: int
    hot_blocks: int
    layers: int
    heads: int
    rows: int


@dataclass(slots=True)
class _Place:
    """slot: the request's table slot. pages: of its blocks' summaries, by index. addresses: of the blocks in
    the arena, by index. unpaged: blocks that have found no page yet, and where their keys are."""

    slot: int
    pages: dict[int, int] = field(default_factory=dict)
    addresses: dict[int, int] = field(default_factory=dict)
    unpaged: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unsummarised:
    """Blocks that need a summary. sources: addresses in the arena, or -1 - id in the pool. pages: where their
    summaries go."""

    sources: list[int]
    pages: list[int]


class DenseTables:
    """One worker's tables. Changes collect until flush(), which puts them on the current stream.

    blocks: what the kernels read (BlockTables). tag, stamp, clock, counters: the hot buffers' state, layers
    first; a kernel sees one layer's part. unsummarised: blocks that found no page for a summary at once,
    since the start; they are picked last until they get one.
    """

    def __init__(self, sizes: DenseSizes, device: torch.device, exact_in_pool: bool) -> None:
        """exact_in_pool: whether requests have a row's slot only once they read the arena."""
        self.sizes = sizes
        self._exact_in_pool = exact_in_pool
        self.unsummarised = 0
        self._device = device

        def table(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.blocks = BlockTables(
            row_slot=table(-1, sizes.rows),
            page=table(-1, sizes.slots, sizes.blocks),
            address=table(0, sizes.slots, sizes.blocks, dtype=torch.int64),
            hot_blocks=table(0, sizes.slots, sizes.hot_blocks),
        )
        self.tag = table(-1, sizes.layers, sizes.slots, sizes.heads, sizes.hot_blocks)
        self.stamp = table(0, sizes.layers, sizes.slots, sizes.heads, sizes.hot_blocks)
        self.clock = table(0, sizes.layers, sizes.slots, sizes.heads)
        self.counters = table(0, sizes.layers, sizes.slots, len(COUNTERS), dtype=torch.int64)
        self._places: dict[str, _Place] = {}
        self._free_slots = list(range(sizes.slots - 1, -1, -1))
        self._free_pages = list(range(sizes.pages - 1, -1, -1))
        self._new: dict[int, Sequence[int]] = {}
        self._added: list[tuple[int, int, int]] = []
        """(slot, block, address)"""
        self._paged: list[tuple[int, int, int, int]] = []
        """(slot, block, page, source)"""
        self._rows: list[int] = []
        self._rows_on_device: list[int] = []

    def reads_arena(self, req_id: str) -> bool:
        """Whether some of the request's blocks are only in the arena."""
        place = self._places.get(req_id)
        return place is not None and bool(place.addresses)

    def picks(self, req_id: str) -> bool:
        """Whether the request's decode steps attend to what they pick."""
        return self.reads_arena(req_id) if self._exact_in_pool else req_id in self._places

    def host_pages(self, req_id: str) -> tuple[I64Array, I64Array]:
        """Indices of the request's blocks that are in the arena, ascending, and their slots' addresses."""
        place = self._places.get(req_id)
        found = sorted(place.addresses.items()) if place is not None else []
        columns = np.array(found, np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def begin(self, req_id: str, hot_blocks: Sequence[int]) -> None:
        """The request is host-backed from now on. hot_blocks: ids of its hot blocks.

        Raises RuntimeError when it is already, or when the table is full: the scheduler has miscounted.
        """
        if req_id in self._places or not self._free_slots:
            raise RuntimeError(f"kvsieve: no table slot for request {req_id} of {self.sizes.slots}")
        slot = self._free_slots.pop()
        self._places[req_id] = _Place(slot)
        self._new[slot] = hot_blocks

    def filled(self, req_id: str, first: int, block_ids: Sequence[int]) -> None:
        """Blocks of the request from index `first` on are full, in these blocks of the pool until the next
        forward; their summaries are made of them."""
        place = self._places[req_id]
        for index, block_id in enumerate(block_ids, first):
            self._give_page(place, index, -1 - block_id)

    def add(self, req_id: str, blocks: Iterable[tuple[int, int]]) -> None:
        """blocks: (index in the request, address of its slot), to be read from there from now on. One that
        has no summary yet gets it from there, too."""
        place = self._places[req_id]
        for index, address in blocks:
            if index in place.addresses or not address:
                raise RuntimeError(f"kvsieve: block {index} of {req_id} is in the arena already, or nowhere")
            place.addresses[index] = address
            self._added.append((place.slot, index, address))
            self._give_page(place, index, address)

    def end(self, req_id: str) -> None:
        """The request's tables are free again; one that has none is skipped."""
        place = self._places.pop(req_id, None)
        if place is None:
            return
        self._free_slots.append(place.slot)
        self._free_pages.extend(place.pages.values())
        self._new.pop(place.slot, None)
        self._added = [entry for entry in self._added if entry[0] != place.slot]
        self._paged = [entry for entry in self._paged if entry[0] != place.slot]

    def set_rows(self, req_ids: Sequence[str]) -> None:
        """req_ids: the batch of the next forward, in row order. Those that pick have a slot."""
        self._rows = [self._places[r].slot if self.picks(r) else -1 for r in req_ids]

    def clear_rows(self) -> None:
        """Graphs that are replayed from now on, without a batch, touch no request's tables."""
        if self._rows_on_device:
            self.blocks.row_slot.fill_(-1)
        self._rows, self._rows_on_device = [], []

    def flush(self) -> Unsummarised:
        """Writes what has changed, after all that is queued on the current stream. Returns the blocks of
        which summaries are to be made before anything else is launched."""
        for place in self._places.values() if self._free_pages else ():
            for index, source in list(place.unpaged.items()):
                self._give_page(place, index, source)
        if self._new:
            self._reset_slots()
        if self._added:
            slots, blocks, addresses = self._columns(self._added)
            self.blocks.address.view(-1).index_copy_(0, slots * self.sizes.blocks + blocks, addresses)
            self._added.clear()
        paged, self._paged = self._paged, []
        if paged:
            slots, blocks, pages, _ = self._columns(paged)
            at = slots * self.sizes.blocks + blocks
            self.blocks.page.view(-1).index_copy_(0, at, pages.to(torch.int32))
        if self._rows != self._rows_on_device:
            rows = self._rows + [-1] * (self.sizes.rows - len(self._rows))
            self.blocks.row_slot.copy_(upload(rows, torch.int32, self._device), non_blocking=True)
            self._rows_on_device = self._rows
        return Unsummarised([entry[3] for entry in paged], [entry[2] for entry in paged])

    def _give_page(self, place: _Place, index: int, source: int) -> None:
        if index in place.pages:
            return
        if not self._free_pages:
            self.unsummarised += index not in place.unpaged
            place.unpaged[index] = source
            return
        place.unpaged.pop(index, None)
        page = place.pages[index] = self._free_pages.pop()
        self._paged.append((place.slot, index, page, source))

    def _columns(self, entries: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        columns = [list(column) for column in zip(*entries, strict=True)]
        return upload(columns, torch.int64, self._device).unbind()

    def _reset_slots(self) -> None:
        slots = upload(list(self._new), torch.int64, self._device)
        self.blocks.page.index_fill_(0, slots, -1)
        self.blocks.address.index_fill_(0, slots, 0)
        self.tag.index_fill_(1, slots, -1)
        self.stamp.index_fill_(1, slots, 0)
        self.clock.index_fill_(1, slots, 0)
        hot = upload([list(blocks) for blocks in self._new.values()], torch.int32, self._device)
        self.blocks.hot_blocks.index_copy_(0, slots, hot)
        self._new.clear()
