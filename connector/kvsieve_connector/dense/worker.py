"""The worker's half in sparse mode on a dense model.

Orders come once a step, before the forward: which requests are host-backed, which of their blocks are read
from the arena from now on, which of them are in the step's batch, and whose contexts go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsieve_connector.dense.check import check_layers
from kvsieve_connector.dense.packing import key_order
from kvsieve_connector.dense.pages import Pages
from kvsieve_connector.dense.plan import DensePlan, tell
from kvsieve_connector.dense.runtime import DenseRuntime
from kvsieve_connector.dense.selectors import make_selector
from kvsieve_connector.metadata import StepOrders
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.host_worker import HostWorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class DenseWorkerHalf(HostWorkerHalf):
    """See the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._plan = DensePlan.of(vllm_config, settings)
        self._runtime: DenseRuntime | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register(kv_caches)
        plan, layers = self._plan, self._copies.layers
        check_layers(self._vllm_config, kv_caches, plan)
        attention = self._vllm_config.compilation_config.static_forward_context[layers[0].name]
        like = kv_caches[layers[0].name]
        dim = like.shape[3] // 2
        selector = make_selector(plan.selector, dim, plan.block_tokens, attention.impl.scale)
        order = key_order(attention.isa, like.dtype, plan.block_tokens, dim)
        names = [layer.name for layer in layers]
        self._runtime = DenseRuntime(plan, names, Pages(layers, like.shape[1]), selector, order, like)
        for impl in self._attention:
            impl.runtime = self._runtime
        tell(plan)

    def begin(self, orders: StepOrders) -> None:
        super().begin(orders)
        contexts = self._dense.contexts
        for req_id in orders.host_ended:
            contexts.end(req_id)
        for backed in orders.host_backed:
            contexts.begin(backed.req_id)
        for host in orders.host_blocks:
            arena = self._arena_of(host.epoch)
            contexts.add(host.req_id, ((index, arena.address(slot)) for index, slot in host.blocks))
        for epoch in orders.forget_epochs:
            self._forget(epoch)
        self._dense.begin(orders.host_rows)

    def finish_saves(self, after_sampling: bool) -> None:
        """Also: what runs without orders, where engines run in step (DP), has no host-backed rows."""
        super().finish_saves(after_sampling)
        if after_sampling:
            self._dense.begin(())

    def results(self) -> Any:
        self.stats.add(**self._dense.take_counts())
        return super().results()

    def close(self) -> None:
        if self._runtime is not None:
            for impl in self._attention:
                impl.runtime = None
        super().close()

    @property
    def _attention(self) -> list[Any]:
        """vLLM's attention implementations of all layers."""
        layers = self._vllm_config.compilation_config.static_forward_context
        return [layers[name].impl for name in self._dense.layers]

    @property
    def _dense(self) -> DenseRuntime:
        assert self._runtime is not None, "the paged cache is not registered yet"
        return self._runtime
