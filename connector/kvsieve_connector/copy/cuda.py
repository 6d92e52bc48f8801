"""Copies on a CUDA worker: batches of copies on streams of their own, from and to the pinned arena.

The arena is pinned in the background (pinning.py), because that takes long; until it is done, saves fail and
loads are refused, which costs only misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvsieve_connector.copy.base import CopyEngine, LayerPages, LoadResult, SaveResult
from kvsieve_connector.copy.pieces import Pieces, Way, way_of
from kvsieve_connector.copy.pinning import CudaRegistrar, Pinning, Pinnings

if TYPE_CHECKING:
    from kvsieve_connector.metadata import BlockPages, LoadOrder, SaveOrder
    from kvsieve_store.client import ArenaMap, ArenaMemory


@dataclass(frozen=True, slots=True)
class Run:
    """Layers whose pages lie one after another both in a block of the paged cache and in a slot.

    start: address of block 0's page of the first layer. stride: bytes between blocks of the cache. size:
    bytes of the run in a page. offset: in a slot. group: KV group whose block ids name the pages. pages: in
    one block of the store.
    """

    start: int
    stride: int
    size: int
    offset: int
    group: int
    pages: int


@dataclass(slots=True)
class _Batch:
    """Copies on a stream. copied: bytes. begun, done: events around them."""

    copied: int
    begun: torch.cuda.Event
    done: torch.cuda.Event

    @property
    def seconds(self) -> float:
        """Time of the copies; once `done` has come."""
        return self.begun.elapsed_time(self.done) / 1000


def runs_of(layers: list[LayerPages]) -> list[Run]:
    """Layers merged into runs: with a block-outermost layout, one per KV group; else one per layer."""
    runs: list[Run] = []
    for layer in layers:
        start, stride, size = layer.view.data_ptr(), layer.view.stride(0), layer.page_bytes
        last = runs[-1] if runs else None
        if (
            last is not None
            and layer.pages == last.pages == 1
            and (layer.group, stride) == (last.group, last.stride)
            and start == last.start + last.size
            and layer.offset == last.offset + last.size
        ):
            runs[-1] = Run(last.start, stride, last.size + size, last.offset, last.group, 1)
        else:
            runs.append(Run(start, stride, size, layer.offset, layer.group, layer.pages))
    return runs


class CudaCopyEngine(CopyEngine):
    """Blocks are copied whole, after the forward: full CUDA graphs run no layer hooks."""

    def __init__(self, layers: list[LayerPages], shard: int) -> None:
        super().__init__(layers, shard)
        self._device = layers[0].view.device
        loaded, saved = runs_of(layers), runs_of(self.written)
        self._load_runs, self._save_runs = RunTable(loaded), RunTable(saved)
        low, _ = torch.cuda.Stream.priority_range()
        self._save_stream = torch.cuda.Stream(self._device, priority=low)
        self._load_stream = torch.cuda.Stream(self._device, priority=low)
        self._arena: ArenaMap | None = None
        self._load_way, self._save_way = _way(loaded), _way(saved)
        self._pinnings = Pinnings(CudaRegistrar(self._device))
        self._pinning: Pinning | None = None
        self._saves: list[tuple[list[SaveOrder], _Batch]] = []
        self._loads: list[tuple[LoadOrder, _Batch]] = []
        self._ended: list[LoadResult] = []

    @property
    def ready(self) -> bool:
        return self._pinning is not None and self._pinning.done

    def use(self, arena: ArenaMap | None) -> None:
        self._arena = arena
        self._pinning = self._pinnings.of(arena) if arena is not None else None

    def let_go(self, memory: ArenaMemory) -> None:
        self._pinnings.let_go(memory)

    def drain(self) -> None:
        self._save_stream.synchronize()
        self._load_stream.synchronize()
        self._ended = self.loaded()  # judged by the arena that they have read
        self._saves = []

    def save_layer(self, index: int, orders: list[SaveOrder]) -> None:
        """Left to finish_saves: one run per block, not one per layer."""

    def finish_saves(self, orders: list[SaveOrder], done_layers: int) -> None:
        blocks = [(order.slot, order.pages) for order in orders]
        pieces = self._pieces(self._save_runs, blocks)
        self._saves.append((orders, self._launch(self._save_stream, self._save_way, pieces)))

    def saved(self) -> SaveResult:
        jobs: list[int] = []
        copied, seconds = 0, 0.0
        while self._saves and self._saves[0][1].done.query():
            orders, batch = self._saves.pop(0)
            copied += batch.copied
            seconds += batch.seconds
            for order in orders:
                if self._arena is not None and self.written:
                    self._arena.set_layers_done(order.slot, self.shard, len(self.written))
                jobs.append(order.job)
        return SaveResult(jobs, copied, seconds)

    def start_load(self, order: LoadOrder) -> None:
        if not self._intact(order):
            self._ended.append(LoadResult(order.req_id, False, 0, 0.0, 0))
            return
        blocks = [(ref.slot, pages) for ref, pages in zip(order.refs, order.pages, strict=True)]
        pieces = self._pieces(self._load_runs, blocks).reversed()
        self._loads.append((order, self._launch(self._load_stream, self._load_way, pieces)))

    def loaded(self) -> list[LoadResult]:
        results, self._ended = self._ended, []
        while self._loads and self._loads[0][1].done.query():
            order, batch = self._loads.pop(0)
            ok = self._intact(order)
            results.append(LoadResult(order.req_id, ok, batch.copied, batch.seconds, len(order.refs)))
        return results

    def guard_blocks(self) -> None:
        if self._saves:
            torch.cuda.current_stream(self._device).wait_event(self._saves[-1][1].done)

    def close(self) -> None:
        self.drain()
        self.use(None)
        self._pinnings.close()

    def _intact(self, order: LoadOrder) -> bool:
        """Whether this arena's slots hold what was matched."""
        if self._arena is None or self._arena.attachment.instance != order.instance:
            return False
        found = self._arena.generations([ref.slot for ref in order.refs])
        return bool(found.tolist() == [ref.generation for ref in order.refs])

    def _launch(self, stream: torch.cuda.Stream, way: Way, pieces: Pieces) -> _Batch:
        """Copies after all that is queued on the current stream: it may still use the blocks."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begun.record()
            if pieces.sizes.size:
                way(pieces, self._device)
            done.record()
        return _Batch(pieces.copied, begun, done)

    def _pieces(self, runs: RunTable, blocks: list[tuple[int, BlockPages]]) -> Pieces:
        assert self._arena is not None
        bases = [self._arena.address(slot) for slot, _ in blocks]
        return runs.pieces(bases, [pages for _, pages in blocks])


class RunTable:
    """Runs in a form from which the pieces of many blocks are made at once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        pages = [
            (run.start, run.stride, run.size, run.offset + i * run.size, run.group, i)
            for run in runs
            for i in range(run.pages)
        ]
        table = np.array(pages, np.int64).reshape(-1, 6)
        self._starts, self._strides, self._sizes, self._offsets, self._groups, self._pages = table.T

    def pieces(self, bases: Sequence[int], blocks: Sequence[BlockPages]) -> Pieces:
        """Every run of every block, from the paged cache to the arena. bases: addresses of the blocks' slots.

        Page 0 is out of a sliding window: nobody reads it.
        """
        if not blocks:
            return Pieces(*np.empty((3, 0), np.int64))
        counts = np.array([len(pages) for pages in blocks[0]], np.int64)
        numbers = chain.from_iterable(chain.from_iterable(blocks))
        ids = np.fromiter(numbers, np.int64, len(blocks) * counts.sum()).reshape(len(blocks), -1)
        ids = ids[:, (counts.cumsum() - counts)[self._groups] + self._pages]
        there = ids != 0
        sources = self._starts + ids * self._strides
        targets = np.array(bases, np.int64).reshape(-1, 1) + self._offsets
        sizes = np.broadcast_to(self._sizes, ids.shape)
        return Pieces(sources[there], targets[there], sizes[there])


def _way(runs: list[Run]) -> Way:
    numbers = [n for run in runs for n in (run.start, run.stride, run.size, run.offset)]
    return way_of(max((run.size for run in runs), default=0), math.gcd(*numbers))
