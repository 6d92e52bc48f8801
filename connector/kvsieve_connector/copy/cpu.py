"""Copies on a CPU worker: memmove, layer by layer as they are computed; loads on a thread of their own."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvsieve_connector.copy.base import CopyEngine, LayerPages, LoadResult, SaveResult

if TYPE_CHECKING:
    from kvsieve_connector.metadata import LoadOrder, SaveOrder
    from kvsieve_store.client import ArenaMap, ArenaMemory

logger = init_logger("vllm.kvsieve")

_memmove = ctypes.memmove  # releases the GIL


class CpuCopyEngine(CopyEngine):
    """Saves are done when their call returns. Loads end on a thread; one is good only if no slot was reused
    while it was read."""

    def __init__(self, layers: list[LayerPages], shard: int) -> None:
        super().__init__(layers, shard)
        self._arena: ArenaMap | None = None
        self._saved: list[int] = []
        self._copied, self._seconds = 0, 0.0
        self._orders: queue.Queue[LoadOrder | None] = queue.Queue()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvsieve-load", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._arena is not None

    def use(self, arena: ArenaMap | None) -> None:
        self._arena = arena

    def let_go(self, memory: ArenaMemory) -> None:
        """Nothing to do: what is mapped can be reached."""

    def save_layer(self, index: int, orders: list[SaveOrder]) -> None:
        assert self._arena is not None
        started = time.perf_counter()
        layer = self.written[index]
        base, stride, size = layer.view.data_ptr(), layer.view.stride(0), layer.page_bytes
        for order in orders:
            to = self._arena.address(order.slot) + layer.offset
            for page in order.pages[layer.group]:
                _memmove(to, base + page * stride, size)
                to += size
            self._arena.set_layers_done(order.slot, self.shard, index + 1)
        self._copied += layer.block_bytes * len(orders)
        self._seconds += time.perf_counter() - started

    def finish_saves(self, orders: list[SaveOrder], done_layers: int) -> None:
        for index in range(done_layers, len(self.written)):
            self.save_layer(index, orders)
        self._saved.extend(order.job for order in orders)

    def saved(self) -> SaveResult:
        result = SaveResult(self._saved, self._copied, self._seconds)
        self._saved, self._copied, self._seconds = [], 0, 0.0
        return result

    def start_load(self, order: LoadOrder) -> None:
        self._orders.put(order)

    def loaded(self) -> list[LoadResult]:
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def guard_blocks(self) -> None:
        """Nothing to do: saves have ended when their call returns."""

    def drain(self) -> None:
        self._orders.join()
        self._saved = []

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            started = time.perf_counter()
            copied, ok = 0, False
            try:
                copied, ok = self._load(order)
            except Exception:
                logger.exception("kvsieve: loading blocks of request %s failed", order.req_id)
            seconds = time.perf_counter() - started
            self._results.put(LoadResult(order.req_id, ok, copied, seconds, len(order.refs)))
            self._orders.task_done()

    def _load(self, order: LoadOrder) -> tuple[int, bool]:
        arena = self._arena
        if arena is None or arena.attachment.instance != order.instance:
            return 0, False
        slots = [ref.slot for ref in order.refs]
        wanted = [ref.generation for ref in order.refs]
        if arena.generations(slots).tolist() != wanted:
            return 0, False
        places = [
            (layer, layer.view.data_ptr(), layer.view.stride(0), layer.page_bytes) for layer in self.layers
        ]
        copied = 0
        for slot, pages in zip(slots, order.pages, strict=True):
            at = arena.address(slot)
            for layer, base, stride, size in places:
                source = at + layer.offset
                for page in pages[layer.group]:
                    if page:  # 0: out of a sliding window, nobody reads it
                        _memmove(base + page * stride, source, size)
                        copied += size
                    source += size
        # The lease may have gone while we read; then the slot may have been written anew.
        return copied, arena.generations(slots).tolist() == wanted
