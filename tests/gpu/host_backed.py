"""Looks into a sparse engine of this process, and takes the GPU's copies away from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine.generate import connector_of
from tests.gpu.forcing import Drive, Hook

SPARE_BLOCKS = 96
"""Blocks left free in a squeeze: what decoding a few hundred tokens takes."""

_GARBAGE = 0x3C
"""A byte that no cache format reads as NaN or infinity: 1.5 in e4m3, 0.011 in bfloat16 and float32."""


def sparse_worker(llm: Any) -> Any:
    return connector_of(llm, "worker")._worker


def arena_of(llm: Any) -> Any:
    return sparse_worker(llm)._arena


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def block_pool(llm: Any) -> Any:
    return scheduler_of(llm).kv_cache_manager.block_pool


def throw_out(llm: Any) -> int:
    """Preempts every running request; returns how many."""
    scheduler, count = scheduler_of(llm), 0
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
        count += 1
    scheduler.prev_step_scheduled_req_ids.clear()
    return count


def row_counts(llm: Any) -> dict[str, int]:
    """The swap-in's counters since the start, of all layers and requests."""
    from kvsieve_connector.kernels.tables import COUNTERS

    return _counts(llm, COUNTERS)


def piece_counts(llm: Any) -> dict[str, int]:
    """The same of a dense model's picking."""
    from kvsieve_connector.kernels.block_tables import COUNTERS

    return _counts(llm, COUNTERS)


def _counts(llm: Any, names: Sequence[str]) -> dict[str, int]:
    totals = sparse_worker(llm)._runtime.tables.counters.sum((0, 1)).tolist()
    return dict(zip(names, totals, strict=True))


def host_share(llm: Any) -> float:
    """Of the full blocks of running requests, the share that only the arena holds."""
    tables = sparse_worker(llm)._runtime.tables
    running = scheduler_of(llm).running
    tokens = sparse_worker(llm)._plan.block_tokens
    full = sum(request.num_computed_tokens // tokens for request in running)
    pages = sum(len(tables.host_pages(request.request_id)[0]) for request in running)
    return pages / full if full else math.nan


class Squeeze:
    """Takes the free blocks of the GPU's pool, and overwrites them: what they held can be read nowhere else.

    Called after each step of the engine (forcing.Hook), it does so once all prefills are over. shares: what
    host_share said three steps later. undo() gives the blocks back.
    """

    def __init__(self, llm: Any, spare: int = SPARE_BLOCKS) -> None:
        self._llm, self._spare = llm, spare
        self._taken: list[Any] | None = None
        self._waited = 0
        self.shares: list[float] = []

    def __call__(self, drive: Drive) -> None:
        if self._taken is None:
            if drive.decoding and self._settled():
                self._take()
            return
        self._waited += 1
        if self._waited == 3:
            self.shares.append(host_share(self._llm))

    def undo(self) -> None:
        """May be called at any time between runs; the next run is squeezed anew."""
        if self._taken:
            block_pool(self._llm).free_blocks(self._taken)
        self._taken, self._waited = None, 0

    def _settled(self) -> bool:
        """Whether every request decodes: also one that was preempted has caught up."""
        scheduler = scheduler_of(self._llm)
        running = scheduler.running
        return len(running) == scheduler.get_num_unfinished_requests() and all(
            request.num_computed_tokens + 1 >= request.num_tokens for request in running
        )

    def _take(self) -> None:
        import torch

        pool = block_pool(self._llm)
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        torch.cuda.synchronize()
        ids = [block.block_id for block in taken]
        for layer in sparse_worker(self._llm)._engine.layers:
            layer.view[ids] = _GARBAGE
        torch.cuda.synchronize()
        pool.free_blocks(taken[: self._spare])
        self._taken = taken[self._spare :]


def squeezed(squeeze: Squeeze) -> Callable[[], Hook]:
    """Hooks for one run after another; the blocks are given back in between."""

    def make() -> Hook:
        squeeze.undo()
        return squeeze

    return make


def overwrite_arena(llm: Any, *, drafter_only: bool = False) -> None:
    """Overwrites the main plane of every slot: what is read from there from now on is wrong.

    drafter_only: only the last layer's part of it.
    """
    worker = sparse_worker(llm)
    arena = arena_of(llm)
    names = list(worker._runtime.layers)[-1 if drafter_only else 0 :]
    main = [layer for layer in worker._engine.layers if layer.name in names]
    slots = sum(segment.nbytes for segment in arena.segments) // arena.attachment.extent_bytes
    for slot in range(slots * arena.attachment.slots_per_extent):
        view = arena.slot(slot)
        for layer in main:
            view[layer.offset : layer.offset + layer.block_bytes] = _GARBAGE
