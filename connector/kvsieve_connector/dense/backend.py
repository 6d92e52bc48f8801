"""vLLM's CPU attention over host-backed requests, under the same name.

plugin.py puts this in place of the stock class. An engine that is not in sparse mode gets the stock
implementation and spec from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvsieve_connector.dense.building import dense_config, host_backed_in_sparse_mode
from kvsieve_connector.dense.runtime import Batch, DenseRuntime, Part


class HostCPUAttentionImpl(CPUAttentionBackendImpl):
    """The stock kernel, over caches that are put together of what each request attends to."""

    runtime: DenseRuntime | None = None
    """The worker half's, from when it has registered the caches until it is closed."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        runtime = self.runtime
        batch = runtime.batch(attn_metadata) if runtime is not None and attn_metadata is not None else None
        if batch is None or runtime is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        for part in runtime.parts(layer.layer_name, batch, query):
            out = torch.empty_like(output[: len(part.tokens)])
            cache = part.cache if part.cache is not None else kv_cache
            metadata = self._metadata(layer, attn_metadata, batch, part, query.dtype)
            super().forward(layer, query[part.tokens], key, value, cache, metadata, out)
            output[part.tokens] = out
        return output

    def _metadata(
        self, layer: Any, whole: CPUAttentionMetadata, batch: Batch, part: Part, dtype: torch.dtype
    ) -> CPUAttentionMetadata:
        """A part's. The kernel's schedule depends on lengths only, which most layers share."""
        key = (tuple(part.starts.tolist()), tuple(part.lengths.tolist()))
        if key not in batch.prepared:
            batch.prepared[key] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(part.lengths),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                seq_lens=part.lengths,
                dtype=dtype,
                query_start_loc=part.starts,
                causal=True,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
        return replace(
            whole,
            num_actual_tokens=len(part.tokens),
            max_query_len=int(part.starts.diff().max()),
            query_start_loc=part.starts,
            max_seq_len=int(part.lengths.max()),
            seq_lens=part.lengths,
            block_table=part.table,
            scheduler_metadata=batch.prepared[key],
        )


class HostCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return HostCPUAttentionImpl if dense_config() is not None else CPUAttentionBackendImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return host_backed_in_sparse_mode(super().customize_spec(spec))
