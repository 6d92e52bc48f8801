"""A worker in small, for tests of swap_in: requests, an arena, a paged cache, and what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsieve_connector.kernels.tables import COUNTERS, LayerCache, RequestTables

BLOCK_TOKENS = 64
NONE = -1


@dataclass(frozen=True)
class Face:
    """One implementation: a module with swap_in and prefetch, and its device."""

    module: Any
    device: str


@dataclass(frozen=True)
class Call:
    """rows: table slots of the batch. want: its positions, -1 for padding. arguments: of swap_in, by name."""

    rows: list[int]
    want: torch.Tensor
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Size:
    """batch: most requests in a call. slots: of the tables. blocks: most of a request."""

    batch: int
    slots: int
    blocks: int
    k: int
    hot_blocks: int
    query_tokens: int = 1
    row_bytes: int = 656
    groups: int = 2

    @property
    def hot_rows(self) -> int:
        return self.hot_blocks * BLOCK_TOKENS


class Trace:
    """Requests start, grow, lose blocks to the host, and end; `step` calls swap_in for some and checks it."""

    def __init__(self, face: Face, size: Size, seed: int) -> None:
        self.face, self.size, self.rng = face, size, np.random.default_rng(seed)
        device, s = face.device, size
        self.random = torch.Generator(device).manual_seed(seed)
        self.layer_offset = 4096 + 32
        slot_bytes = self.layer_offset + BLOCK_TOKENS * s.row_bytes + 48
        pages = s.slots * s.blocks + 1
        arena = torch.zeros(pages, slot_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        self.arena = arena[:, self.layer_offset :]
        blocks = s.slots * (s.blocks + s.groups * s.hot_blocks) + 1
        self.pool = self._bytes(blocks, 2, BLOCK_TOKENS, s.row_bytes)  # half is another layer's
        self.truth = self._bytes(s.slots, s.blocks * BLOCK_TOKENS, s.row_bytes)
        self.layer = LayerCache(
            cache=self.pool[:, 1],
            layer_offset=self.layer_offset,
            group=s.groups - 1,
            slot_of=self._full((pages * BLOCK_TOKENS,), NONE, torch.int16),
            tag=self._full((s.slots, s.hot_rows), NONE),
            stamp=self._full((s.slots, s.hot_rows), 0),
            clock=self._full((s.slots, 2), 0),
            counters=self._full((size.slots, len(COUNTERS)), 0, torch.int64),
        )
        self.tables = RequestTables(
            row_slot=self._full((s.batch,), NONE),
            page=self._full((s.slots, s.blocks), 0),
            page_addr=self._full((pages,), 0, torch.int64),
            hot_blocks=self._full((s.groups, s.slots, s.hot_blocks), 0),
        )
        self.arena_address, self.slot_bytes = arena.data_ptr(), slot_bytes
        self.free_pages = list(range(1, pages))
        self.free_arena = list(range(pages))
        self.free_blocks = list(range(1, blocks))
        self.blocks: dict[int, list[int]] = {}  # of live table slots: pool block, or -1 once it is lost
        self.pages: dict[int, dict[int, tuple[int, int]]] = {}  # logical block -> page, arena slot
        self.hot: dict[int, list[int]] = {}
        self.last: dict[int, np.ndarray] = {}
        self.expected = dict.fromkeys(COUNTERS, 0)
        self.missing: list[int] = []  # page rows that the call prepared last will miss

    def _bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, device=self.face.device, generator=self.random)

    def _full(self, shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.face.device)

    def _take(self, free: list[int]) -> int:
        i = int(self.rng.integers(len(free)))
        free[i], free[-1] = free[-1], free[i]
        return free.pop()

    # What happens to requests.

    def start(self, s: int, blocks: int) -> None:
        """A new request in table slot s; all of its blocks are on the GPU."""
        size = self.size
        self.truth[s] = self._bytes(*self.truth.shape[1:])
        self.hot[s] = [self._take(self.free_blocks) for _ in range(size.groups * size.hot_blocks)]
        hot = torch.tensor(self.hot[s], dtype=torch.int32).view(size.groups, size.hot_blocks)
        self.tables.hot_blocks[:, s] = hot.to(self.face.device)
        self.tables.page[s] = 0
        self.layer.tag[s] = NONE
        self.blocks[s], self.pages[s] = [], {}
        for _ in range(blocks):
            self.grow(s)

    def grow(self, s: int) -> None:
        """One more block, on the GPU."""
        b, block = len(self.blocks[s]), self._take(self.free_blocks)
        self.blocks[s].append(block)
        self.layer.cache[block] = self._rows(s, b)

    def lose(self, s: int, b: int) -> None:
        """Block b is read from the arena from now on; something else is written to its place on the GPU."""
        page, slot = self._take(self.free_pages), self._take(self.free_arena)
        size = BLOCK_TOKENS * self.size.row_bytes
        self.arena[slot, :size] = self._rows(s, b).flatten().to("cpu")
        self.tables.page_addr[page] = self.arena_address + slot * self.slot_bytes
        self.layer.slot_of[page * BLOCK_TOKENS : (page + 1) * BLOCK_TOKENS] = NONE
        self.tables.page[s, b] = page
        self.pages[s][b] = (page, slot)
        block, self.blocks[s][b] = self.blocks[s][b], NONE
        self.layer.cache[block] = self._bytes(BLOCK_TOKENS, self.size.row_bytes)
        self.free_blocks.append(block)

    def end(self, s: int) -> None:
        """The request is finished, preempted or aborted: everything that it had is free."""
        self.free_blocks += [block for block in self.blocks.pop(s) if block != NONE] + self.hot.pop(s)
        for page, slot in self.pages.pop(s).values():
            self.free_pages.append(page)
            self.free_arena.append(slot)
            self.arena[slot] = 0xEE
        self.last.pop(s, None)

    def _rows(self, s: int, b: int) -> torch.Tensor:
        return self.truth[s, b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]

    def admit(self) -> None:
        """A new request in a free table slot, if there is one; most of its blocks are on the host."""
        size, rng = self.size, self.rng
        idle = [s for s in range(size.slots) if s not in self.blocks]
        if not idle:
            return
        s = idle[int(rng.integers(len(idle)))]
        self.start(s, int(rng.integers(1, size.blocks + 1)))
        for b in range(len(self.blocks[s]) - 1):
            if rng.random() < 0.8:
                self.lose(s, b)

    def change(self) -> None:
        """Something happens, by chance."""
        size, rng = self.size, self.rng
        if not self.blocks or rng.random() < 0.3:
            self.admit()
        for s in list(self.blocks):
            if len(self.blocks) > 1 and rng.random() < 0.03:
                self.end(s)
                continue
            if len(self.blocks[s]) < size.blocks and rng.random() < 0.1:
                self.grow(s)
            b = int(rng.integers(len(self.blocks[s])))
            if self.blocks[s][b] != NONE and rng.random() < 0.3:
                self.lose(s, b)

    # One call.

    def pick(self, s: int, fresh: float, width: int | None = None) -> np.ndarray:
        """int32 [query_tokens, width or k]: positions like the last ones, a part of them fresh; some -1."""
        size, rng = self.size, self.rng
        tokens, k = len(self.blocks[s]) * BLOCK_TOKENS, width or size.k
        rows = []
        previous = self.last.get(s, np.empty(0, np.int64))
        for _ in range(size.query_tokens if width is None else 1):
            n = min(k, tokens) if rng.random() < 0.8 else int(rng.integers(min(k, tokens) + 1))
            kept = rng.permutation(previous)[: int(n * (1 - fresh))]
            new = np.setdiff1d(rng.permutation(tokens)[: 2 * n], kept)
            row = np.concatenate([kept, rng.permutation(new)[: n - len(kept)]])
            previous = row
            rows.append(rng.permutation(np.concatenate([row, np.full(k - len(row), NONE, row.dtype)])))
        self.last[s] = previous
        return np.stack(rows).astype(np.int32)

    def step(self, fresh: float = 0.15) -> None:
        """swap_in for some of the requests."""
        self.swap_in(*self.draw(fresh))

    def draw(self, fresh: float) -> tuple[list[int], dict[int, np.ndarray]]:
        """Some of the requests, in any order, padding rows between them, and what they ask for."""
        live = self.rng.permutation(list(self.blocks))[: int(self.rng.integers(1, self.size.batch + 1))]
        rows = np.full(self.size.batch, NONE, np.int64)
        rows[: len(live)] = live
        rows = self.rng.permutation(rows)[: int(self.rng.integers(self.size.batch // 2, self.size.batch + 1))]
        return [int(s) for s in rows], {int(s): self.pick(int(s), fresh) for s in rows if s != NONE}

    def place(self, rows: list[int]) -> torch.Tensor:
        """Say which request each batch row is; returns the block table, in batch order."""
        self.tables.row_slot.fill_(NONE)
        self.tables.row_slot[: len(rows)] = torch.tensor(rows, dtype=torch.int32).to(self.face.device)
        table = np.zeros((len(rows) + 1, self.size.blocks + 3), np.int32)  # larger than it need be
        for r, s in enumerate(rows):
            if s != NONE:
                table[r, : len(self.blocks[s])] = np.maximum(self.blocks[s], 0)
        return torch.from_numpy(table).to(self.face.device)[:, : self.size.blocks]

    def swap_in(self, rows: list[int], picks: dict[int, np.ndarray]) -> None:
        """One call for the requests of `rows`, with these positions; then all that must hold is checked."""
        call = self.prepare(rows, picks)
        self.face.module.swap_in(**call.arguments)
        self.check(call)

    def prepare(self, rows: list[int], picks: dict[int, np.ndarray]) -> Call:
        """A call, which is to be made next."""
        size, device = self.size, self.face.device
        block_table = self.place(rows)
        garbage = np.full((size.query_tokens, size.k), 7, np.int32)  # not to be read
        asked = np.concatenate([garbage[:0], *(picks.get(s, garbage) for s in rows)])
        topk = torch.from_numpy(asked).to(device)
        out = self._full(topk.shape, 123456789)
        counts = self._full((len(topk),), 123456789)
        live = torch.tensor([s != NONE for s in rows], dtype=torch.bool, device=device)
        live_rows = live.repeat_interleave(size.query_tokens)
        want = torch.where(live_rows[:, None], topk, NONE)
        self._expect(rows, want)
        arguments = {
            "layer": self.layer,
            "tables": self.tables,
            "topk": topk,
            "block_table": block_table,
            "out": out,
            "counts": counts,
            "query_tokens": size.query_tokens,
            "stride_rows": 2 * BLOCK_TOKENS,
        }
        return Call(rows, want, arguments)

    def check(self, call: Call) -> None:
        """All that must hold once the call was made."""
        want, out = call.want, call.arguments["out"]
        assert torch.equal(call.arguments["counts"], (want >= 0).sum(1, dtype=torch.int32))
        assert torch.equal(out == NONE, want == NONE)
        self._check_bytes(call.rows, want, out)
        self._check_tables()
        self._check_counters()

    def prefetch(self, rows: list[int], positions: np.ndarray) -> None:
        """One call; positions: int32 [len(rows), n]."""
        self.place(rows)
        self.face.module.prefetch(self.layer, self.tables, torch.from_numpy(positions).to(self.face.device))
        self._check_tables()
        self.expected["prefetched_rows"] = self.counter("prefetched_rows")

    def counter(self, name: str) -> int:
        return int(self.layer.counters[:, COUNTERS.index(name)].sum())

    # What must hold.

    def _expect(self, rows: list[int], want: torch.Tensor) -> None:
        """What the call will add to the counters."""
        self.missing = []
        for r, s in enumerate(rows):
            asked = want[r * self.size.query_tokens : (r + 1) * self.size.query_tokens]
            asked = asked[asked >= 0].long()
            if s == NONE or not len(asked):
                continue
            pages = self.tables.page[s][asked // BLOCK_TOKENS].long()
            on_host = (pages * BLOCK_TOKENS + asked % BLOCK_TOKENS)[pages > 0].unique()
            missing = on_host[self.layer.slot_of[on_host] < 0].tolist()
            self.missing += missing
            misses = len(missing)
            gpu_rows = int((pages == 0).sum())
            self.expected["asked_rows"] += len(asked)
            self.expected["gpu_rows"] += gpu_rows
            self.expected["missed_rows"] += misses
            self.expected["hot_rows_hit"] += len(asked) - gpu_rows - misses

    def _check_bytes(self, rows: list[int], want: torch.Tensor, out: torch.Tensor) -> None:
        """Every index leads to the bytes of its position."""
        flat = self.pool.view(-1, self.size.row_bytes)[BLOCK_TOKENS:]  # of this layer: block * 128 + row
        slots = torch.tensor(rows, device=self.face.device).repeat_interleave(self.size.query_tokens)
        for part in range(0, len(want), 32):
            positions, places = want[part : part + 32], out[part : part + 32]
            there = positions >= 0
            truth = self.truth[
                slots[part : part + 32, None].expand_as(positions)[there], positions[there].long()
            ]
            assert torch.equal(flat[places[there].long()], truth)

    def _check_tables(self) -> None:
        """tag and slot_of are each other's inverse, for every request that lives."""
        live = list(self.blocks)
        tag = self.layer.tag[live].long()
        held = tag >= 0
        assert tag[held].unique().numel() == int(held.sum()), "a page row is in two hot slots"
        slots = torch.arange(self.size.hot_rows, device=self.face.device).expand_as(tag)
        assert torch.equal(self.layer.slot_of[tag[held]].long(), slots[held])
        pages = self.tables.page[live].long()
        rows = pages[pages > 0][:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=self.face.device)
        assert int((self.layer.slot_of[rows] >= 0).sum()) == int(held.sum())
        assert int(self.layer.slot_of.min()) >= NONE

    def _check_counters(self) -> None:
        have = dict(zip(COUNTERS, self.layer.counters.sum(0).tolist(), strict=True))
        for name in ("asked_rows", "gpu_rows", "hot_rows_hit", "missed_rows", "unplaced_rows"):
            assert have[name] == self.expected[name], name


def run(face: Face, size: Size, seed: int, steps: int, prefetch: bool = False) -> Trace:
    """A random trace, checked after every step."""
    trace = Trace(face, size, seed)
    for step in range(steps):
        trace.change()
        while len(trace.blocks) < min(size.batch, 2 * step):
            trace.admit()
        if prefetch:
            rows = list(trace.blocks)[: size.batch]
            width = min(size.k, size.hot_rows)
            last = dict(trace.last)
            trace.prefetch(rows, np.concatenate([trace.pick(s, 0.3, width) for s in rows]))
            trace.last = last
        trace.step(fresh=1.0 if step % 50 == 49 else 0.15)
    assert trace.counter("missed_rows") > 0
    return trace
