"""The scheduler's half in sparse mode on a dense model: as for a DSA model, without an indexer.

There is one KV group, all of it host-backed. A prefix that the store has is loaded nowhere: it is read where
it is, from the request's first step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.metadata import HostRow, StepOrders
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.plan import HostPlan
from kvsieve_connector.sparse.scheduler import SparseScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class DenseScheduler(SparseScheduler):
    """See the module's docstring."""

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        orders = super().build_orders(output)
        block_state = output.kv_connector_block_state
        for req_id, tokens in output.num_scheduled_tokens.items():
            host = self._hosts.get(req_id)
            if host is None or not host.told or block_state is None:
                continue
            request = host.request
            (blocks,) = block_state.resolve_block_ids(req_id)
            newest = blocks[(request.num_computed_tokens + tokens - 1) // self.block_tokens]
            decodes = tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
            orders.host_rows.append(HostRow(newest, req_id, decodes))
        return orders

    @property
    def attention(self) -> str:
        assert isinstance(self.plan, DensePlan)
        return self.plan.attention

    def _plan_of(self, vllm_config: VllmConfig, settings: ConnectorSettings) -> HostPlan:
        return DensePlan.of(vllm_config, settings)
