"""The scheduler's half in sparse mode on a dense model: as for a DSA model, without an indexer.

There is one KV group, all of it host-backed. A prefix that the store has is loaded nowhere: it is read where
it is, from the request's first step on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.metadata import HostFilled, HostRow, StepOrders
from kvsieve_connector.scheduler import ResolveBlockIds
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.plan import HostPlan
from kvsieve_connector.sparse.scheduler import SparseScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class DenseScheduler(SparseScheduler):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_hints = False  # a hint names rows of a DSA model
        self._on_gpu = self.plan.hot_blocks > 0

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        orders = super().build_orders(output)
        block_state = output.kv_connector_block_state
        if block_state is None:
            return orders
        if self._on_gpu:
            self._tell_of_filled(output.num_scheduled_tokens, block_state.resolve_block_ids, orders)
        else:
            self._tell_of_rows(output.num_scheduled_tokens, block_state.resolve_block_ids, orders)
        return orders

    def _tell_of_rows(
        self, scheduled: Mapping[str, int], resolve: ResolveBlockIds, orders: StepOrders
    ) -> None:
        """Which rows of the batch are host-backed: vLLM's V1 runner does not tell its workers."""
        for req_id, tokens in scheduled.items():
            host = self._hosts.get(req_id)
            if host is None or not host.told:
                continue
            request = host.request
            (blocks,) = resolve(req_id)
            newest = blocks[(request.num_computed_tokens + tokens - 1) // self.block_tokens]
            decodes = tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
            orders.host_rows.append(HostRow(newest, req_id, decodes))

    def _tell_of_filled(
        self, scheduled: Mapping[str, int], resolve: ResolveBlockIds, orders: StepOrders
    ) -> None:
        """Which blocks were full before this step: their summaries are made before its forward.

        A block that fills is noted in the step that fills it, as it may be released before the next. Until
        that one's forward the pool has it, whoever the block was given to.
        """
        for req_id, host in self._hosts.items():
            computed = host.request.num_computed_tokens
            noted = host.begins_with + len(host.filled)
            full = (computed + scheduled.get(req_id, 0)) // self.block_tokens
            if full > noted:
                (blocks,) = resolve(req_id)
                host.filled += blocks[noted:full]
            before = computed // self.block_tokens
            if host.told and before > host.summarised:
                first = host.summarised - host.begins_with
                ids = host.filled[first : before - host.begins_with]
                orders.host_filled.append(HostFilled(req_id, host.summarised, tuple(ids)))
                host.summarised = before

    @property
    def attention(self) -> str:
        assert isinstance(self.plan, DensePlan)
        return self.plan.attention

    def _plan_of(self, vllm_config: VllmConfig, settings: ConnectorSettings) -> HostPlan:
        return DensePlan.of(vllm_config, settings)
