"""The worker's half: carries out the scheduler's orders on this rank's paged cache.

It talks to nobody but the scheduler: the arena is mapped from the attachment that comes with the orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from kvsieve_connector.arenas import Arenas
from kvsieve_connector.copy.base import CopyEngine, LayerPages
from kvsieve_connector.geometry import WorkerGeometry, worker_geometry
from kvsieve_connector.metadata import Handshake, LoadOrder, StepOrders, WorkerReport
from kvsieve_connector.stats import KVSieveStats
from kvsieve_store.client import ArenaMap, Attachment
from kvsieve_store.errors import KVSieveError
from kvsieve_store.protocol.layout import SlotLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvsieve")


class WorkerHalf:
    """See the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.stats = KVSieveStats()
        self._rank = 0
        self._geometry: WorkerGeometry | None = None
        self._engine: CopyEngine | None = None
        self._order_of_layer: dict[str, int] = {}
        self._arenas = Arenas(lambda memory: self._copies.let_go(memory))
        self._arena: ArenaMap | None = None
        self._orders = StepOrders()
        self._done_layers = 0
        self._saved: list[int] = []
        self._failed_saves: list[int] = []
        self._epoch = 0
        self._said_unready = False
        self._refused_loads: list[LoadOrder] = []

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """kv_caches: layer name -> this rank's paged cache of the layer, all on one device."""
        self._geometry, views = worker_geometry(self._vllm_config, self._kv_cache_config, kv_caches)
        self._rank = rank = get_tensor_model_parallel_rank()
        layers = self._layer_pages(self._geometry, views, rank)
        self._order_of_layer = {layer.name: i for i, layer in enumerate(layers) if layer.writes}
        device = next(iter(kv_caches.values())).device.type
        self._engine = _copy_engine(device)(layers, rank)

    def handshake(self) -> Handshake | None:
        return Handshake(self._geometry) if self._geometry is not None else None

    # A step, in the order in which vLLM calls

    def begin(self, orders: StepOrders) -> None:
        """The step's orders are here; nothing has been launched."""
        self._orders, self._done_layers = orders, 0
        if orders.attachment is not None:
            self._map(orders.attachment)
        elif orders.detach:
            self._unmap()
        self._guard_blocks()
        if orders.saves and not self._ready:
            self._failed_saves += [order.job for order in orders.saves]
            orders.saves = []

    def save_layer(self, name: str) -> None:
        """The layer's attention has run: its keys and values of this step are in the paged cache."""
        index = self._order_of_layer.get(name)
        # Layers are copied in slot order, so that layers_done is a count; another order waits for the end.
        if self._orders.saves and index is not None and index == self._done_layers:
            self._copies.save_layer(index, self._orders.saves)
            self._done_layers += 1

    def prepare_forward(self, step: dict[str, Any]) -> None:
        """The forward is next. step: what the runner tells of it; nothing in vLLM's V1 runner."""

    def start_loads(self) -> None:
        """Starts the step's loads: they fill blocks of requests that are not in this step's batch."""
        loads, self._orders.loads = self._orders.loads, []
        for order in loads:
            if self._ready:
                self._copies.start_load(order)
            else:
                self._refused_loads.append(order)

    def finish_saves(self, after_sampling: bool) -> None:
        """The forward is over, or launched on the device: copies what the layer hooks have not.

        after_sampling: nothing of this step follows that should not wait for the copies.
        """
        saves, self._orders.saves = self._orders.saves, []
        if saves:
            self._copies.finish_saves(saves, self._done_layers)
        if after_sampling:
            self._guard_blocks()

    def results(self) -> KVConnectorTransferResults:
        """Requests whose loads have ended since the last call; failed ones are among the ended.

        vLLM asks for this before the stats and the report, so it is here that copies are looked after.
        """
        self._guard_blocks()
        if self._engine is not None:
            saved = self._engine.saved()
            self._saved += saved.jobs
            self.stats.add(saved_bytes=saved.copied, save_seconds=saved.seconds)
        results = KVConnectorTransferResults()
        for order in self._refused_loads:
            results.finished_recving.add(order.req_id)
            results.failed_recving.add(order.req_id)
        self.stats.add(failed_loads=len(self._refused_loads))
        self._refused_loads = []
        for load in self._engine.loaded() if self._engine is not None else ():
            results.finished_recving.add(load.req_id)
            if load.ok:
                blocks = load.blocks if self._rank == 0 else 0
                self.stats.add(loaded_blocks=blocks, loaded_bytes=load.copied, load_seconds=load.seconds)
            else:
                results.failed_recving.add(load.req_id)
                self.stats.add(failed_loads=1)
        return results

    def report(self) -> WorkerReport | None:
        unready = bool(self._epoch) and not self._ready
        news = {self._epoch: 1 if unready else -1} if unready != self._said_unready else {}
        if not (self._saved or self._failed_saves or news):
            return None
        report = WorkerReport(dict.fromkeys(self._saved, 1), dict.fromkeys(self._failed_saves, 1), news)
        self._saved, self._failed_saves, self._said_unready = [], [], unready
        return report

    def close(self) -> None:
        if self._engine is None:
            return
        self._unmap()
        self._arenas.close()
        self._engine.close()
        self._engine = None

    def _layer_pages(
        self, geometry: WorkerGeometry, views: dict[str, torch.Tensor], rank: int
    ) -> list[LayerPages]:
        """This rank's layers in slot order, with their places in a slot (protocol.layout.SlotLayout)."""
        planes = geometry.planes(self._tp_size)
        offsets = SlotLayout.of_planes(planes).layer_offsets
        pages = []
        for plane, shards in zip(planes, offsets, strict=True):
            shard = rank if plane.shards > 1 else 0
            layers = [layer for layer in geometry.layers if layer.plane == plane.name]
            for layer, offset in zip(layers, shards[shard], strict=True):
                pages.append(
                    LayerPages(
                        name=layer.name,
                        view=views[layer.name],
                        offset=offset,
                        group=layer.group,
                        pages=layer.pages,
                        writes=plane.shards > 1 or rank == 0,
                    )
                )
        return pages

    def _map(self, attachment: Attachment) -> None:
        """Maps the arena for a new session. Failing that, works without a store."""
        self._unmap()
        self._epoch = attachment.epoch
        try:
            self._arena = self._arenas.map(attachment)
        except (KVSieveError, OSError, ValueError) as error:
            logger.error("kvsieve: can't map the arena, blocks are neither saved nor loaded: %s", error)
        else:
            self._copies.use(self._arena)

    def _unmap(self) -> None:
        """The session is over: nothing is copied any more."""
        self._copies.drain()
        self._copies.use(None)
        arena, self._arena = self._arena, None
        if arena is not None:
            self._session_over(arena)
        self._epoch, self._said_unready = 0, False

    def _session_over(self, arena: ArenaMap) -> None:
        """What becomes of the arena of the session of this epoch."""
        self._arenas.leave(arena)

    def _guard_blocks(self) -> None:
        """What is launched from now on may write to blocks that a save still reads: let it wait."""
        if self._engine is not None:
            self._engine.guard_blocks()

    @property
    def _copies(self) -> CopyEngine:
        assert self._engine is not None, "the paged cache is not registered yet"
        return self._engine

    @property
    def _ready(self) -> bool:
        return self._engine is not None and self._engine.ready


def _copy_engine(device: str) -> type[CopyEngine]:
    """Imports only what the device has. Raises ValueError for a device that no engine copies on."""
    if device == "cpu":
        from kvsieve_connector.copy.cpu import CpuCopyEngine

        return CpuCopyEngine
    if device == "cuda":
        from kvsieve_connector.copy.cuda import CudaCopyEngine

        return CudaCopyEngine
    raise ValueError(f"kvsieve: a paged cache on {device!r} is not supported, only on cpu and cuda")
