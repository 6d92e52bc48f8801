"""KVSieveConnector: vLLM's KV connector interface, handed on to the scheduler's and the worker's half.

vLLM makes one per process and role. This class only translates; what happens is in scheduler.py and
worker.py. The interface is that of vLLM 0.32 and 0.33 (distributed/kv_transfer/kv_connector/v1/base.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.stats import CacheHitSource

from kvsieve_connector.dense.check import check_config as check_dense
from kvsieve_connector.geometry import check_supported
from kvsieve_connector.metadata import Handshake, StepOrders, WorkerReport
from kvsieve_connector.scheduler import SchedulerHalf
from kvsieve_connector.session import Session
from kvsieve_connector.settings import ConnectorSettings, parse_settings
from kvsieve_connector.sparse.check import check_config as check_sparse
from kvsieve_connector.sparse.plan import is_dense
from kvsieve_connector.stats import KVSievePromMetrics, KVSieveStats
from kvsieve_connector.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvsieve")


class KVSieveConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams full blocks to the host's store as they are computed, and loads the prefixes that it has.

    Settings: settings.ConnectorSettings. Raises ValueError at start for a model or a setting that it can't
    serve, and PoolMismatchError when the store's pool of this name has another spec.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._settings = settings
        check_supported(vllm_config, kv_cache_config)
        if settings.mode == "sparse":
            check = check_dense if is_dense(vllm_config) else check_sparse
            check(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._session: Session | None = None
        if role is KVConnectorRole.SCHEDULER:
            # A block that can't be loaded is computed instead: that is what a cache owes. The scheduler reads
            # this right after it has made us.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = _scheduler_half(vllm_config, kv_cache_config, settings)
            self._session = Session(vllm_config, settings, self._scheduler)
        else:
            self._worker = _worker_half(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is only a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Sleep frees and remaps the paged cache under our copies."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Block-outermost where blocks are copied whole: one run per block instead of one per layer."""
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda() else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KVSieveStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVSievePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._sched.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self._session is not None
        self._session.start({rank: m for rank, m in metadata.items() if isinstance(m, Handshake)})

    def on_new_request(self, request: Request) -> None:
        self._sched.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._sched.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._sched.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._settings.mode == "sparse":
            # The workers' tables change before the forward, not after it.
            scheduler_output.has_sync_kv_loads = True
        return self._sched.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._sched.loads_ended(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )
        report = connector_output.kv_connector_worker_meta
        self._sched.take_report(report if isinstance(report, WorkerReport) else None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._sched.finished(request)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._sched.take_events()

    def has_pending_block_frees(self) -> bool:
        return self._sched.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._sched.has_pending_work()

    def reset_cache(self) -> bool:
        """The engine's weights may have changed: what it saved must not be matched again.

        The pool belongs to other engines, too, so this engine leaves it, for as long as it runs.
        """
        assert self._session is not None
        self._session.close()
        self._sched.use(None)
        logger.warning(
            "kvsieve: the cache was reset; this engine works without the store from now on. To use one "
            "again, drop the pool ('kvsieve clear POOL') if weights have changed, and start the engine anew"
        )
        return True

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._work.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._work.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self._work.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._work.prepare_forward(kwargs)
        self._work.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request joins a batch after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._work.save_layer(layer_name)

    def finish_forward(self) -> None:
        # With a drafter, its layers are computed after this; wait_for_save comes after them.
        if self.has_connector_metadata() and self._vllm_config.speculative_config is None:
            self._work.finish_saves(after_sampling=False)

    def wait_for_save(self) -> None:
        self._work.finish_saves(after_sampling=True)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._work.results()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._work.report()

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler or self._work).stats.take()

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def _sched(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _work(self) -> WorkerHalf:
        assert self._worker is not None, "called in the scheduler"
        return self._worker


def _scheduler_half(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
) -> SchedulerHalf:
    if settings.mode == "cache":
        return SchedulerHalf(vllm_config, kv_cache_config, settings)
    if is_dense(vllm_config):
        from kvsieve_connector.dense.scheduler import DenseScheduler

        return DenseScheduler(vllm_config, kv_cache_config, settings)
    from kvsieve_connector.sparse.scheduler import SparseScheduler

    return SparseScheduler(vllm_config, kv_cache_config, settings)


def _worker_half(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
) -> WorkerHalf:
    """Sparse mode's is imported only where it is wanted: it needs vLLM's backends of the device."""
    if settings.mode == "cache":
        return WorkerHalf(vllm_config, kv_cache_config)
    if is_dense(vllm_config):
        if vllm_config.device_config.device_type == "cuda":
            from kvsieve_connector.dense.gpu.worker import DenseGpuWorkerHalf

            return DenseGpuWorkerHalf(vllm_config, kv_cache_config, settings)
        from kvsieve_connector.dense.worker import DenseWorkerHalf

        return DenseWorkerHalf(vllm_config, kv_cache_config, settings)
    from kvsieve_connector.sparse.worker import SparseWorkerHalf

    return SparseWorkerHalf(vllm_config, kv_cache_config, settings)
