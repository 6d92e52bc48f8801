"""The worker's half in sparse mode on a dense model, on a GPU.

Orders come once a step, before the forward: which requests are host-backed, which of their blocks have
filled or are read from the arena from now on, and whose tables go. They are on the device before anything of
the step runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from kvsieve_connector.dense.gpu.build import dense_runtime
from kvsieve_connector.dense.gpu.check import check_layers
from kvsieve_connector.dense.gpu.memory import release_memory
from kvsieve_connector.dense.gpu.runtime import DenseGpuRuntime
from kvsieve_connector.dense.gpu.tables import DenseSizes
from kvsieve_connector.dense.plan import DensePlan, tell
from kvsieve_connector.kernels.block_tables import COUNTERS
from kvsieve_connector.metadata import StepOrders
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.counters import CounterReader, piece_stats
from kvsieve_connector.sparse.host_worker import HostWorkerHalf
from kvsieve_connector.sparse.worker import batch_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvsieve")


class DenseGpuWorkerHalf(HostWorkerHalf):
    """See the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._plan = DensePlan.of(vllm_config, settings)
        self._runtime: DenseGpuRuntime | None = None
        self._counters: CounterReader | None = None
        self._piece_bytes = 0
        self._unsummarised = 0
        self._runs_in_step = vllm_config.parallel_config.data_parallel_size > 1

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register(kv_caches)
        plan, layers = self._plan, self._copies.layers
        check_layers(self._vllm_config, kv_caches, plan)
        release_memory()
        impl = self._static[layers[0].name].impl
        caches = [kv_caches[layer.name] for layer in layers]
        self._runtime = dense_runtime(
            plan, layers, caches, self._sizes(len(layers), caches[0]), float(impl.scale)
        )
        blocks = next(iter(self._runtime.layers.values())).blocks
        self._piece_bytes = blocks.piece_bytes
        self._counters = CounterReader(self._runtime.tables.counters, COUNTERS)
        if caches[0].is_cuda:
            from kvsieve_connector.kernels import pick_blocks, summarise

            tables, picks = self._runtime.tables.blocks, self._runtime.picks
            pick_blocks.prepare(blocks, tables, picks, impl.num_queries_per_kv)
            summarise.prepare(caches[0], plan.selector)
        for name, host in self._runtime.layers.items():
            self._static[name].impl.host = host
        tell(plan)

    def begin(self, orders: StepOrders) -> None:
        super().begin(orders)
        tables = self._dense.tables
        for req_id in orders.host_ended:
            tables.end(req_id)
        for backed in orders.host_backed:
            tables.begin(backed.req_id, backed.hot_blocks[0])
        for filled in orders.host_filled:
            tables.filled(filled.req_id, filled.first, filled.block_ids)
        for host in orders.host_blocks:
            arena = self._arena_of(host.epoch)
            tables.add(host.req_id, ((index, arena.address(slot)) for index, slot in host.blocks))
        for epoch in orders.forget_epochs:
            self._forget(epoch)

    def prepare_forward(self, step: dict[str, Any]) -> None:
        """step: what vLLM's V2 runner gives to start_load_kv. Empty when there is no forward.

        Raises RuntimeError when a runner gives less than is needed to know the batch.
        """
        if step and not step.keys() >= {"request_ids", "scheduler_output"}:
            raise RuntimeError(
                f"kvsieve: sparse mode needs vLLM's V2 model runner; this one tells only {sorted(step)}"
            )
        batch = batch_rows(step["request_ids"], step["scheduler_output"]) if step else ()
        summarised = self._dense.begin(batch)
        if self._rank == 0:
            self.stats.add(summarised_blocks=summarised)

    def finish_saves(self, after_sampling: bool) -> None:
        """Also: where engines run in step (DP), an idle one replays graphs without a batch: they must touch
        no request's tables."""
        super().finish_saves(after_sampling)
        if after_sampling and self._runs_in_step:
            self._dense.idle()

    def results(self) -> Any:
        assert self._counters is not None
        found = piece_stats(self._counters.poll(), self._piece_bytes)
        missing = self._dense.tables.unsummarised
        if missing > self._unsummarised and self._rank == 0:
            found["unsummarised_blocks"] = missing - self._unsummarised
            self._unsummarised = missing
            logger.warning_once(
                "kvsieve: no memory is left for summaries: blocks without one are picked last. Give "
                "kvsieve.host_tokens more than %d",
                self._plan.host_tokens,
            )
        self.stats.add(**found)
        return super().results()

    def close(self) -> None:
        if self._runtime is not None:
            for name in self._runtime.layers:
                self._static[name].impl.host = None
            if self._runtime.tables.tag.is_cuda:
                torch.cuda.synchronize()  # a step in flight may still read the arena
        super().close()

    def _sizes(self, layers: int, like: torch.Tensor) -> DenseSizes:
        config, plan = self._vllm_config, self._plan
        requests = config.scheduler_config.max_num_seqs
        graphs = config.compilation_config.cudagraph_capture_sizes or [0]
        return DenseSizes(
            slots=plan.table_slots(self._kv_cache_config.num_blocks, 1, requests),
            blocks=plan.max_blocks,
            pages=plan.summary_pages,
            hot_blocks=plan.hot_blocks,
            layers=layers,
            heads=like.shape[1],
            rows=max(requests, *graphs),
        )

    @property
    def _static(self) -> dict[str, Any]:
        """vLLM's attention layers, by name."""
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        return layers

    @property
    def _dense(self) -> DenseGpuRuntime:
        assert self._runtime is not None, "the paged cache is not registered yet"
        return self._runtime
