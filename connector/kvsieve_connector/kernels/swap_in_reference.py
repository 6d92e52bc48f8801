"""What `swap_in` and `prefetch` mean, in torch on CPU; page_addr holds addresses of this process's memory.

Which slot a miss takes is the implementation's choice, within these rules: never one used in the same call,
and a slot used since the hand last came by is passed over once. A call of several ranks is begin() on each,
then on each what that returned; to one that does the second before another does the first, the other is late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .tables import (
    ABSENT,
    COUNTERS,
    LayerCache,
    Peers,
    RequestTables,
    check_prefetch,
    check_swap_in,
    owner,
)

__all__ = ["LayerCache", "Peers", "RequestTables", "begin", "prefetch", "swap_in"]

HAND, CALLS = 0, 1
CACHE, SLOT_OF, FLAGS = 0, 1, 2
PREFETCHED = 1 << 30  # marks the stamp of a row that no swap_in has asked for yet


def swap_in(
    layer: LayerCache,
    tables: RequestTables,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    query_tokens: int,
    stride_rows: int,
) -> None:
    """As swap_in.swap_in."""
    begin(layer, tables, topk, block_table, out, counts, query_tokens=query_tokens, stride_rows=stride_rows)()


def begin(
    layer: LayerCache,
    tables: RequestTables,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    query_tokens: int,
    stride_rows: int,
) -> Callable[[], None]:
    """A swap_in until it has published its rows; returns the rest of it, which reads those of others."""
    check_swap_in(layer, tables, topk, block_table, out, counts, query_tokens)
    out.fill_(-1)
    if counts is not None:
        counts.zero_()
    shared: list[tuple[_HotBuffer, list[int]]] = []
    for r in range(topk.shape[0] // query_tokens):
        s = int(tables.row_slot[r])
        if s < 0:
            continue
        layer.clock[s, CALLS] += 1
        buffer = _HotBuffer(layer, tables, s)
        mine = slice(r * query_tokens, (r + 1) * query_tokens)
        block, offset, pages = _places(layer, tables, s, topk[mine])
        on_gpu, on_host = (topk[mine] >= 0) & (pages == 0), pages > 0
        places = block_table[r][block[on_gpu]] * stride_rows + offset[on_gpu]
        out[mine][on_gpu] = places.to(torch.int32)

        rows = (pages * layer.cache.shape[1] + offset)[on_host]
        missing = buffer.use(rows.unique(), count=True)
        theirs = [row for row in missing if not buffer.owns(row)]
        for row in missing:
            placed = buffer.place(row, 0) if row in theirs else buffer.fetch(row, 0)
            buffer.count("unplaced_rows", not placed)
        shared.append((buffer, theirs))
        slots = layer.slot_of[rows].to(torch.int32)
        out[mine][on_host] = torch.where(slots >= 0, buffer.index(slots, stride_rows), -1)

        asked, gpu_rows = int((topk[mine] >= 0).sum()), int(on_gpu.sum())
        buffer.count("asked_rows", asked)
        buffer.count("gpu_rows", gpu_rows)
        buffer.count("hot_rows_hit", asked - gpu_rows - len(missing))
        buffer.count("missed_rows", len(missing))
        if counts is not None:
            counts[mine] = (topk[mine] >= 0).sum(1, dtype=torch.int32)
    if layer.peers is not None:
        for buffer, _ in shared:
            buffer.publish(layer.peers)

    def finish() -> None:
        for buffer, theirs in shared:
            for row in theirs:
                buffer.read(layer.peers, row)

    return finish


def prefetch(layer: LayerCache, tables: RequestTables, positions: torch.Tensor) -> None:
    """As swap_in.prefetch."""
    check_prefetch(layer, tables, positions)
    for r in range(positions.shape[0]):
        s = int(tables.row_slot[r])
        if s < 0:
            continue
        buffer = _HotBuffer(layer, tables, s)
        _, offset, pages = _places(layer, tables, s, positions[r])
        rows = (pages * layer.cache.shape[1] + offset)[pages > 0].unique()
        for row in buffer.use(rows, count=False):
            buffer.count("prefetched_rows", buffer.fetch(row, PREFETCHED))


def _places(
    layer: LayerCache, tables: RequestTables, s: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logical block, row in it and page number (0 where there is none) of each position, int64."""
    asked = positions.clamp(min=0).long()
    block, offset = asked // layer.cache.shape[1], asked % layer.cache.shape[1]
    return block, offset, torch.where(positions >= 0, tables.page[s][block], 0).long()


class _HotBuffer:
    """The hot buffer of one request in one layer."""

    def __init__(self, layer: LayerCache, tables: RequestTables, s: int) -> None:
        self.layer, self.tables, self.s = layer, tables, s
        self.tag, self.stamp, self.clock = layer.tag[s], layer.stamp[s], layer.clock[s]
        self.blocks = tables.hot_blocks[layer.group, s]
        self.epoch = int(self.clock[CALLS]) + 1

    def use(self, rows: torch.Tensor, *, count: bool) -> list[int]:
        """Stamp the page rows that are present; returns the others."""
        slots = self.layer.slot_of[rows].long()
        present = slots[slots >= 0]
        if count:
            self.count("prefetched_rows_used", int((self.stamp[present] & PREFETCHED != 0).sum()))
        self.stamp[present] = self.epoch
        return [int(row) for row in rows[slots < 0]]

    def owns(self, row: int) -> bool:
        """Whether this rank is the one to fetch the page row from the host."""
        peers = self.layer.peers
        return peers is None or owner(row, peers.places.shape[0]) == peers.rank

    def fetch(self, row: int, mark: int) -> bool:
        """Copy one page row from the host to a slot; False if every slot is in use."""
        placed = self.place(row, mark)
        if placed:
            self._store(row, self._host_address(row))
        return placed

    def place(self, row: int, mark: int) -> bool:
        """Give one page row a slot; False if every slot is in use."""
        h = self._victim()
        if h is None:
            return False
        old = int(self.tag[h])
        if old >= 0:
            self.layer.slot_of[old] = ABSENT
        self.tag[h] = row
        self.layer.slot_of[row] = h
        self.stamp[h] = self.epoch | mark
        return True

    def publish(self, peers: Peers) -> None:
        """Tell the others that this buffer stays as it is until the next call."""
        call = ctypes.c_int64(int(peers.mark) + self.epoch)
        for other, place in enumerate(peers.places.tolist()):
            if other != peers.rank:
                at = place[FLAGS] + 8 * (self.s * len(peers.places) + peers.rank)
                ctypes.memmove(at, ctypes.byref(call), 8)

    def read(self, peers: Peers | None, row: int) -> None:
        """Copy a page row that has a slot from the rank that owns it, or else from the host."""
        assert peers is not None
        whose = owner(row, len(peers.places))
        late = int(peers.flags[self.s, whose]) != int(peers.mark) + self.epoch
        self.count("late_rows", late)
        address = self._host_address(row)
        if not late:
            place = peers.places[whose].tolist()
            h = ctypes.c_int16.from_address(place[SLOT_OF] + 2 * row).value
            if h >= 0:
                address = place[CACHE] + self._offset(h)
                self.count("peer_rows", 1)
        self._store(row, address)

    def _store(self, row: int, address: int) -> None:
        h, row_bytes = int(self.layer.slot_of[row]), self.layer.cache.shape[2]
        if h >= 0:
            ctypes.memmove(self.layer.cache.data_ptr() + self._offset(h), address, row_bytes)

    def _host_address(self, row: int) -> int:
        _, block_tokens, row_bytes = self.layer.cache.shape
        page, offset = divmod(row, block_tokens)
        return int(self.tables.page_addr[page]) + self.layer.layer_offset + offset * row_bytes

    def _offset(self, h: int) -> int:
        """Bytes from the start of a rank's cache to hot slot h: the same blocks on every rank."""
        _, block_tokens, row_bytes = self.layer.cache.shape
        block = int(self.blocks[h // block_tokens])
        return block * self.layer.cache.stride(0) + h % block_tokens * row_bytes

    def index(self, slots: torch.Tensor, stride_rows: int) -> torch.Tensor:
        block_tokens = self.layer.cache.shape[1]
        blocks = self.blocks[slots.clamp(min=0).long() // block_tokens]
        return blocks * stride_rows + slots % block_tokens

    def count(self, name: str, n: int) -> None:
        self.layer.counters[self.s, COUNTERS.index(name)] += n

    def _victim(self) -> int | None:
        """Second chance, two turns of the hand at most."""
        hot_rows = self.tag.shape[0]
        for _ in range(2 * hot_rows):
            h = int(self.clock[HAND]) % hot_rows
            self.clock[HAND] += 1
            stamp = int(self.stamp[h])
            if stamp == 0:
                return h
            if stamp & ~PREFETCHED != self.epoch:
                self.stamp[h] = 0
        return None
