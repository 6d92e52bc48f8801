"""The worker's half in sparse mode: keeps the tables that attention reads the arena by.

Orders come once a step, before the forward: which requests are host-backed, which of their blocks are read
from the arena from now on, and whose tables go. They are on the device before anything of the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from kvsieve_connector.copy.base import LayerPages
from kvsieve_connector.device import upload
from kvsieve_connector.kernels.swap_in import LayerCache
from kvsieve_connector.kernels.tables import COUNTERS
from kvsieve_connector.metadata import HintLoad, HintSave, StepOrders
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.check import check_layers
from kvsieve_connector.sparse.counters import CounterReader, row_stats
from kvsieve_connector.sparse.hints import read_hint, write_hint
from kvsieve_connector.sparse.host_worker import HostWorkerHalf
from kvsieve_connector.sparse.kernel_set import kernel_set
from kvsieve_connector.sparse.peers import share
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.prefetch import Policy, default_name, make_policy
from kvsieve_connector.sparse.runtime import BatchRow, SparseRuntime, workspace_rows
from kvsieve_connector.sparse.spec import main_groups
from kvsieve_connector.sparse.tables import HostTables, TableSizes
from kvsieve_connector.sparse.warm import RowsCopies
from kvsieve_store.client import ArenaMap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvsieve")


class SparseWorkerHalf(HostWorkerHalf):
    """See the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._settings = settings
        self._plan = SparsePlan.of(vllm_config, settings)
        self._runtime: SparseRuntime | None = None
        self._counters: CounterReader | None = None
        self._hot_rows = RowsCopies()
        """On their way to slots of the arena that is mapped."""
        self._unshare: Callable[[], None] = lambda: None
        self._runs_in_step = vllm_config.parallel_config.data_parallel_size > 1

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register(kv_caches)
        check_layers(self._vllm_config, [name for name in kv_caches if ".indexer." not in name])
        groups = main_groups(self._kv_cache_config)
        main = [layer for layer in self._copies.layers if layer.group in groups]
        sizes = table_sizes(self._vllm_config, self._kv_cache_config, self._plan, len(main))
        device = main[0].view.device
        tables = HostTables(sizes, device)
        caches = {
            layer.name: self._layer_cache(layer, order, groups.index(layer.group), tables)
            for order, layer in enumerate(main)
        }
        policy = self._policy(list(caches))
        caches, self._unshare = share(self._vllm_config, self._settings, policy, caches, tables)
        self._runtime = SparseRuntime(
            self._plan,
            tables,
            caches,
            kernel_set(device),
            policy,
            workspace_rows(self._vllm_config),
            self._model_layers(list(caches)),
        )
        self._counters = CounterReader(tables.counters, COUNTERS)
        for name, impl in self._attention.items():
            impl.host = self._runtime.layers[name]
        logger.info(
            "kvsieve: sparse mode: %d main layers in %d KV groups, hot buffers of %d rows, at most %d "
            "host-backed requests, %.0f MiB of tables",
            len(main),
            len(groups),
            self._plan.hot_rows,
            sizes.slots,
            sizes.bytes / 2**20,
        )

    def begin(self, orders: StepOrders) -> None:
        super().begin(orders)
        tables = self._sparse.tables
        for save in orders.hint_saves:
            self._begin_hint(save)
        for req_id in orders.host_ended:
            tables.end(req_id)
        for backed in orders.host_backed:
            tables.begin(backed.req_id, backed.hot_blocks)
        for host in orders.host_blocks:
            arena = self._arena_of(host.epoch)
            tables.add(host.req_id, ((index, arena.address(slot)) for index, slot in host.blocks))
        for load in orders.hint_loads:
            self._load_hint(load)
        for epoch in orders.forget_epochs:
            self._forget(epoch)

    def prepare_forward(self, step: dict[str, Any]) -> None:
        """step: what vLLM's V2 runner gives to start_load_kv. Empty when there is no forward.

        Raises RuntimeError when a runner gives less than is needed to know the batch.
        """
        if not step:
            self._sparse.begin(())
            return
        if "request_ids" not in step or "scheduler_output" not in step:
            raise RuntimeError(
                f"kvsieve: sparse mode needs vLLM's V2 model runner; this one tells only {sorted(step)}"
            )
        self._sparse.begin(batch_rows(step["request_ids"], step["scheduler_output"]))

    def finish_saves(self, after_sampling: bool) -> None:
        """Also: where engines run in step (DP), an idle one replays graphs without a batch, the model's and a
        drafter's: they must touch no request's tables."""
        super().finish_saves(after_sampling)
        if after_sampling and self._runs_in_step:
            self._sparse.tables.clear_rows()

    def results(self) -> Any:
        assert self._counters is not None
        self.stats.add(**row_stats(self._counters.poll(), self._plan.row_bytes))
        self._write_hints()
        return super().results()

    def close(self) -> None:
        if self._runtime is not None:
            for impl in self._attention.values():
                impl.host = None
        if self._runtime is not None and self._runtime.tables.tag.is_cuda:
            torch.cuda.synchronize()  # a step in flight may still read the arena
        self._unshare()
        super().close()

    # Hints: rank 0 writes them, all ranks having the same lists; each rank reads them

    def _begin_hint(self, order: HintSave) -> None:
        if self._rank != 0:
            self._saved.append(order.job)
            return
        warm = self._sparse.warm
        rows = warm.hot_rows(order.req_id) if warm is not None and self._arena is not None else None
        if rows is None:
            self._failed_saves.append(order.job)
        else:
            self._hot_rows.start(order.job, order.slot, rows)

    def _write_hints(self) -> None:
        for copy in self._hot_rows.landed():
            rows = copy.rows.numpy()
            if self._arena is None or not (rows >= 0).any():  # nothing was hot
                self._failed_saves.append(copy.job)
                continue
            write_hint(self._arena.slot(copy.slot), rows, self._plan.block_tokens)
            self._saved.append(copy.job)

    def _load_hint(self, order: HintLoad) -> None:
        warm, arena, ref = self._sparse.warm, self._arena, order.ref
        if warm is None or arena is None or order.epoch != self._epoch:
            return
        sizes, most = self._sparse.tables.sizes, self._plan.hot_rows
        rows = read_hint(arena.slot(ref.slot), sizes.layers, sizes.block_tokens, order.tokens, most)
        intact = arena.generation(ref.slot) == ref.generation
        count = int(np.count_nonzero(rows >= 0)) if rows is not None and intact else 0
        if rows is not None and count:
            warm.resume(order.req_id, upload(rows, torch.int32, self._sparse.tables.tag.device))
        if self._rank == 0:
            self.stats.add(used_hints=int(count > 0), refused_hints=int(not count), warmed_rows=count)

    def _model_layers(self, names: list[str]) -> int:
        """How many of the layers come before a drafter's, which vLLM numbers after the model's."""
        config = self._vllm_config.model_config.hf_text_config
        own = getattr(config, "num_hidden_layers", len(names))
        return sum(extract_layer_index(name) < own for name in names)

    def _policy(self, names: list[str]) -> Policy:
        """The configured policy. names: the main layers, in order; one without an indexer uses the list of
        the last one before it that has one."""
        layers = self._vllm_config.compilation_config.static_forward_context
        leaders: list[int] = []
        for order, name in enumerate(names):
            own = order == 0 or getattr(layers.get(name), "indexer", None) is not None
            leaders.append(order if own else leaders[-1])
        name = self._settings.prefetch or default_name(len(names), leaders)
        return make_policy(name, len(names), leaders=leaders)

    def _layer_cache(self, layer: LayerPages, order: int, group: int, tables: HostTables) -> LayerCache:
        tokens, row = self._plan.block_tokens, self._plan.row_bytes
        if layer.pages != 1 or layer.page_bytes != tokens * row:
            raise ValueError(
                f"kvsieve: layer {layer.name}: pages of {layer.page_bytes} bytes, {tokens} rows of {row} "
                "expected"
            )
        view = layer.view
        return LayerCache(
            cache=view.as_strided((view.shape[0], tokens, row), (view.stride(0), row, 1)),
            layer_offset=layer.offset,
            group=group,
            slot_of=tables.slot_of[order],
            tag=tables.tag[order],
            stamp=tables.stamp[order],
            clock=tables.clock[order],
            counters=tables.counters[order],
        )

    def _session_over(self, arena: ArenaMap) -> None:
        self._hot_rows.forget()
        super()._session_over(arena)

    @property
    def _attention(self) -> dict[str, Any]:
        """vLLM's attention implementations of the main layers, by name."""
        layers = self._vllm_config.compilation_config.static_forward_context
        return {name: layers[name].impl for name in self._sparse.layers}

    @property
    def _sparse(self) -> SparseRuntime:
        assert self._runtime is not None, "the paged cache is not registered yet"
        return self._runtime


def batch_rows(request_ids: Sequence[str], scheduler_output: Any) -> list[BatchRow]:
    """The step's batch in row order. scheduler_output: vLLM's SchedulerOutput."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled = scheduler_output.num_scheduled_tokens
    return [BatchRow(req_id, computed[req_id], scheduled[req_id]) for req_id in request_ids]


def table_sizes(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, plan: SparsePlan, layers: int
) -> TableSizes:
    """A host-backed request holds hot blocks of the pool, which bounds how many there can be."""
    groups = len(main_groups(kv_cache_config))
    blocks = -(-vllm_config.model_config.max_model_len // plan.block_tokens)
    requests = vllm_config.scheduler_config.max_num_seqs
    graphs = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    return TableSizes(
        slots=plan.table_slots(kv_cache_config.num_blocks, groups, requests),
        blocks=blocks,
        pages=plan.pages(kv_cache_config.num_blocks),
        groups=groups,
        hot_blocks=plan.hot_blocks,
        layers=layers,
        block_tokens=plan.block_tokens,
        rows=max(requests, *graphs),
    )
