"""What pick_blocks and summarise promise, checked without their references: on made-up contexts of which each
piece can be told by its bytes. Run with the references on a CPU, and with the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvsieve_connector.dense.selectors import make_selector
from kvsieve_connector.kernels.block_tables import COUNTERS, BlockTables, LayerBlocks, Picks, vectors_of
from kvsieve_connector.kernels.summarise import KeySources


@dataclass(frozen=True)
class Face:
    """The functions under test. device: where they run."""

    pick_blocks: Any
    summarise: Any
    device: str


@dataclass(frozen=True)
class Shape:
    """lengths: tokens of the requests' contexts. in_arena: share of full blocks that only the arena has.
    unknown: share of these that have no summary."""

    lengths: Sequence[int] = (700, 333, 65, 17)
    heads: int = 2
    group: int = 4
    dim: int = 64
    tokens: int = 16
    layers: int = 2
    selector: str = "part-means"
    budget: int = 8
    first: int = 1
    window: int = 2
    slack: int = 4
    in_arena: float = 0.7
    unknown: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def picks(self) -> Picks:
        return Picks(self.selector, self.budget, self.first, self.window, self.dim**-0.5)


SHAPES = {
    "small": Shape(),
    "one request": Shape(lengths=(2000,), heads=8, dim=128),
    "no slack": Shape(slack=0, budget=16),
    "about as long as a list": Shape(lengths=(177, 193, 176, 192, 178, 16, 1)),
    "blocks of 64": Shape(tokens=64, lengths=(5000, 900), dim=128, heads=3),
    "three query heads": Shape(group=3),
    "one query head": Shape(group=1, dim=128),
    "eight query heads": Shape(group=8, dim=128),
    "quest": Shape(selector="quest-bounds"),
    "mean": Shape(selector="mean-key"),
    "outlier": Shape(selector="mean-outlier"),
    "outlier, blocks of 48": Shape(selector="mean-outlier", tokens=48, lengths=(5000, 900)),
    "blocks of 32": Shape(tokens=32, lengths=(3000, 900), dim=128),
    "blocks of 48": Shape(tokens=48, lengths=(5000, 900)),
    "blocks of 160": Shape(tokens=160, lengths=(9000, 3000), dim=128, budget=4),
    "quest, float16": Shape(selector="quest-bounds", dtype=torch.float16),
    "heads of 80": Shape(dim=80),
    "heads of 256": Shape(dim=256, group=2, lengths=(2000, 500)),
    "quest, twelve query heads": Shape(selector="quest-bounds", group=12, dim=96),
    "mean, heads of 32": Shape(selector="mean-key", dim=32, heads=4),
    "seventeen query heads": Shape(group=17),
    # On 132 multiprocessors clusters of four, two, one thread block; and more rows than multiprocessors.
    "24 rows": Shape(lengths=tuple(range(60, 780, 60)), heads=2),
    "64 rows": Shape(lengths=tuple(range(60, 700, 40)), heads=4),
    "128 rows": Shape(lengths=tuple(range(60, 700, 20)), heads=4),
    "168 rows": Shape(lengths=tuple(range(60, 900, 20)), heads=4),
    "float16": Shape(dtype=torch.float16),
    "no budget": Shape(budget=0),
    "no first": Shape(first=0),
    "all of it": Shape(budget=60, lengths=(700, 100)),
    "budget of 100": Shape(budget=100, lengths=(9000, 4000), heads=1),
    "without some summaries": Shape(unknown=0.3),
    "all in the arena": Shape(in_arena=1.0),
    "all in the pool": Shape(in_arena=0.0),
}


class Scene:
    """Requests with made-up contexts, tables for them, and what each head's hot buffer must have."""

    def __init__(self, face: Face, shape: Shape, seed: int = 0) -> None:
        self.face, self.shape = face, shape
        self._random = np.random.default_rng(seed)
        self._torch = torch.Generator().manual_seed(seed)
        s = shape
        self.blocks = [-(-length // s.tokens) + 8 for length in s.lengths]  # with room to grow
        total = sum(self.blocks)
        columns = 2 * s.dim
        self.content = torch.randn((s.layers, total, s.heads, s.tokens, columns), generator=self._torch)
        self.content = self.content.to(s.dtype)
        # A value that tells a piece: its number in the first value of its first token.
        marks = torch.arange(total * s.heads).view(total, s.heads) % 251 + 1
        self.content[:, :, :, 0, s.dim] = marks.to(s.dtype)
        self.hot = s.picks.listed + s.slack
        slots, most = len(s.lengths) + 1, max(self.blocks)
        num_blocks = total + slots * self.hot + 3
        order = self._random.permutation(np.arange(1, num_blocks))
        self.pool_ids = np.split(order[:total], np.cumsum(self.blocks)[:-1])
        device = torch.device(face.device)
        pool = torch.full(
            (num_blocks, s.layers, s.heads, s.tokens, columns), -3.0, dtype=s.dtype, device=device
        )
        pool = pool.contiguous()
        self.caches = [pool[:, layer] for layer in range(s.layers)]
        piece = s.tokens * columns * 2
        arena = torch.zeros((total, s.layers, s.heads, s.tokens, columns), dtype=s.dtype)
        self.arena = arena.pin_memory() if device.type == "cuda" else arena
        self.slots = self._random.permutation(slots)[: len(s.lengths)]
        page = np.full((slots, most), -1)
        address = np.zeros((slots, most), np.int64)
        self.known: list[list[bool]] = []
        pages = self._random.permutation(total + 5)
        self.pages = total + 5
        sources, at = [], []
        table = np.zeros((len(s.lengths), most + 2), np.int32)
        self.in_arena: list[set[int]] = []
        first = 0
        for request, length in enumerate(s.lengths):
            full = (length - 1) // s.tokens
            lost = set(np.flatnonzero(self._random.random(max(full - s.window, 0)) < s.in_arena).tolist())
            self.in_arena.append(lost)
            known = []
            for block in range(self.blocks[request]):
                whole, pool_id = first + block, int(self.pool_ids[request][block])
                table[request, block] = pool_id
                if block in lost:
                    arena[whole] = self.content[:, whole]
                    self.arena[whole] = self.content[:, whole]
                    address[self.slots[request], block] = self.arena[whole].data_ptr()
                else:
                    pool[pool_id] = self.content[:, whole].to(device)
                known.append(not (block in lost and self._random.random() < s.unknown))
                if known[-1]:
                    page[self.slots[request], block] = pages[whole]
                    sources.append(self.arena[whole].data_ptr() if block in lost else -1 - pool_id)
                    at.append(pages[whole])
            self.known.append(known)
            first += self.blocks[request]
        width = vectors_of(s.selector, s.tokens) * s.dim
        self.summaries = torch.zeros((s.layers, s.heads, self.pages, width), dtype=s.dtype, device=device)

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values)).to(dtype).to(device)

        hot = order[total : total + slots * self.hot].reshape(slots, self.hot)
        self.tables = BlockTables(
            on_device(self.slots, torch.int32),
            on_device(page, torch.int32),
            on_device(address, torch.int64),
            on_device(hot, torch.int32),
        )
        self.block_table = on_device(table, torch.int32)
        self.layers = [
            LayerBlocks(
                cache,
                layer * s.heads * piece,
                self.summaries[layer],
                torch.full((slots, s.heads, self.hot), -1, dtype=torch.int32, device=device),
                torch.zeros((slots, s.heads, self.hot), dtype=torch.int32, device=device),
                torch.zeros((slots, s.heads), dtype=torch.int32, device=device),
                torch.zeros((slots, len(COUNTERS)), dtype=torch.int64, device=device),
            )
            for layer, cache in enumerate(self.caches)
        ]
        keys = KeySources(
            tuple(self.caches),
            on_device([cache.data_ptr() for cache in self.caches], torch.int64),
            on_device([layer.layer_offset for layer in self.layers], torch.int64),
        )
        face.summarise(
            keys, s.selector, on_device(sources, torch.int64), on_device(at, torch.int32), self.summaries
        )
        self.hot_now: dict[tuple[int, int, int], dict[int, int]] = {}
        """Of a layer, request and head: block -> the step that used it last."""
        self.steps = 0

    def check_summaries(self) -> None:
        s = self.shape
        selector = make_selector(s.selector, s.dim, s.tokens)
        page = self.tables.page.cpu()
        first = 0
        for request in range(len(s.lengths)):
            for block in range(self.blocks[request]):
                if self.known[request][block]:
                    keys = self.content[:, first + block, :, :, : s.dim].transpose(1, 2)
                    wanted = selector.summarise(keys)
                    found = self.summaries[:, :, int(page[self.slots[request], block])].cpu().float()
                    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
            first += self.blocks[request]

    def step(self, lengths: Sequence[int], layer: int = 0) -> None:
        """Picks in a layer for contexts of these lengths, and checks all of it. A negative length: that row's
        request has no table slot."""
        s, blocks = self.shape, self.layers[layer]
        self.steps += 1
        rows = len(lengths)
        device = self.block_table.device
        wide = torch.randn((rows, s.heads * s.group + 2, s.dim), generator=self._torch).to(s.dtype).to(device)
        query = wide[:, : s.heads * s.group]
        row_slot = [int(self.slots[r]) if length >= 0 else -1 for r, length in enumerate(lengths)]
        self.tables.row_slot.copy_(torch.tensor(row_slot, dtype=torch.int32))
        before = blocks.counters.sum(0).cpu()
        most = max(self.tables.page.shape[1], s.picks.listed + 1)
        out = torch.full((rows * s.heads, most), -7, dtype=torch.int32, device=device)
        out_lengths = torch.full((rows * s.heads,), -7, dtype=torch.int32, device=device)
        out_query = torch.zeros((rows * s.heads, s.group, s.dim), dtype=s.dtype, device=device)
        self.face.pick_blocks(
            blocks,
            self.tables,
            s.picks,
            query,
            torch.tensor([abs(length) for length in lengths], dtype=torch.int32, device=device),
            self.block_table[:rows],
            out,
            out_lengths,
            out_query,
            write_whole=True,
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(out_query.cpu(), query.reshape(out_query.shape).cpu())
        pieces = blocks.cache.as_strided(
            ((blocks.cache.shape[0] - 1) * blocks.stride_pieces + s.heads, s.tokens, 2 * s.dim),
            (s.tokens * 2 * s.dim, 2 * s.dim, 1),
        )
        counts = torch.zeros(len(COUNTERS), dtype=torch.int64)
        for request, length in enumerate(lengths):
            for head in range(s.heads):
                row = request * s.heads + head
                count = -(-int(out_lengths[row]) // s.tokens)
                got = pieces[out[row, :count].long()].cpu()
                counts += self._check_row(layer, request, head, length, int(out_lengths[row]), got, query)
        assert torch.equal(blocks.counters.sum(0).cpu() - before, counts)

    def _check_row(
        self,
        layer: int,
        request: int,
        head: int,
        length: int,
        tokens: int,
        got: torch.Tensor,
        query: torch.Tensor,
    ) -> torch.Tensor:
        s = self.shape
        nothing = torch.zeros(len(COUNTERS), dtype=torch.int64)
        first = sum(self.blocks[:request])
        true = self.content[layer, first : first + self.blocks[request], head]
        if length <= 0:
            assert tokens == -length
            in_pool = [b for b in range(len(got)) if b not in self.in_arena[request]]
            assert torch.equal(got[in_pool], true[in_pool])
            return nothing
        full = (length - 1) // s.tokens
        listed = min(full, s.picks.listed)
        assert tokens == listed * s.tokens + length - full * s.tokens
        assert torch.equal(got[-1], true[full])
        chosen = self._chosen(got[:-1], true[:full])
        assert len(chosen) == listed
        assert chosen == sorted(set(chosen))
        if full > s.picks.listed:
            self._check_choice(layer, request, head, full, chosen, query)
        return self._replace(layer, request, head, chosen)

    def _chosen(self, got: torch.Tensor, true: torch.Tensor) -> list[int]:
        """Which blocks these pieces are, byte for byte."""
        known = {piece.view(torch.int16).numpy().tobytes(): block for block, piece in enumerate(true)}
        return [known[piece.contiguous().view(torch.int16).numpy().tobytes()] for piece in got]

    def _check_choice(
        self, layer: int, request: int, head: int, full: int, chosen: list[int], query: torch.Tensor
    ) -> None:
        s = self.shape
        assert set(range(s.first)) <= set(chosen)
        assert set(range(full - s.window, full)) <= set(chosen)
        page = self.tables.page.cpu()[self.slots[request], :full].long()
        own = query[request, head * s.group : (head + 1) * s.group].cpu().unsqueeze(0)
        summaries = self.summaries[layer, head].cpu()[page.clamp(min=0)].unsqueeze(1)
        known = torch.tensor(self.known[request][:full])
        selector = make_selector(s.selector, s.dim, s.tokens, s.picks.scale)
        scores = torch.full((full,), -torch.inf)
        scores[known] = selector.score(own, summaries[known])[:, 0]
        candidates = scores[s.first : full - s.window]
        least = candidates.topk(s.budget).values.min() if s.budget else torch.tensor(torch.inf)
        picked = [b for b in chosen if s.first <= b < full - s.window]
        assert len(picked) == s.budget
        if s.budget:
            assert scores[picked].min() >= least - 1e-3

    def _replace(self, layer: int, request: int, head: int, chosen: list[int]) -> torch.Tensor:
        """The hot buffer after these were read, and what is counted."""
        hot = self.hot_now.setdefault((layer, request, head), {})
        wanted = [block for block in chosen if block in self.in_arena[request]]
        hits = [block for block in wanted if block in hot]
        missed = [block for block in wanted if block not in hot]
        for block in wanted:
            hot[block] = self.steps
        # Which of several that were used in the same step goes first is not promised, only their number.
        tag = self.layers[layer].tag[self.slots[request], head].tolist()
        now = {block for block in tag if block >= 0}
        assert set(wanted) <= now
        assert len(now) == min(len(hot), self.hot)
        gone = set(hot) - now
        assert all(hot[g] <= hot[k] for g in gone for k in now)
        for block in gone:
            del hot[block]
        return torch.tensor([len(chosen), len(chosen) - len(wanted), len(hits), len(missed)])


def picks_what_scores_highest(face: Face, shape: Shape) -> None:
    """Step by step, contexts growing, in two layers by turns."""
    scene = Scene(face, shape)
    scene.check_summaries()
    for number in range(6):
        lengths = [length + number for length in shape.lengths]
        for layer in range(shape.layers):
            scene.step(lengths, layer)


def leaves_rows_without_a_slot_alone(face: Face) -> None:
    scene = Scene(face, Shape(in_arena=0.5))
    before = scene.layers[0].tag.clone()
    scene.step([-700, -333, 0, -17])
    assert torch.equal(scene.layers[0].tag, before)


@dataclass
class Long:
    """A random run: contexts grow, rows come and go."""

    shape: Shape
    steps: int
    seed: int = 3
    scene: Scene = field(init=False)

    def run(self, face: Face) -> None:
        self.scene = Scene(face, self.shape, self.seed)
        random = np.random.default_rng(self.seed)
        for number in range(self.steps):
            grown = number * 7 * self.shape.tokens // self.steps
            lengths = [
                (length + grown) * (1 if random.random() < 0.8 else -1) for length in self.shape.lengths
            ]
            self.scene.step(lengths, number % self.shape.layers)
