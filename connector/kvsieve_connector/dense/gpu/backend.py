"""vLLM's FlashAttention over host-backed requests, under the same name.

plugin.py puts this in place of the stock class. An engine that is not in sparse mode gets the stock
implementation, builder and spec from it.

Decode: each request and KV head is a row of its own for the stock kernel, with a block table of what it
attends to, in the layer's cache seen as pages of one head. That works inside full CUDA graphs. Prefill over
a context that is not all in the pool: its pages are put together in a staging buffer, layer by layer. A batch
whose contexts are all in the pool takes the stock path.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvsieve_connector.dense.gpu.memory import hold_memory
from kvsieve_connector.dense.gpu.runtime import DenseLayer, PrefillPart
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.sparse.building import sparse_config
from kvsieve_connector.sparse.plan import is_dense
from kvsieve_connector.sparse.spec import HostBackedSpec, as_host_backed


def _dense_config() -> VllmConfig | None:
    """The configuration of the engine being built, if it is a dense model's in sparse mode."""
    config = sparse_config()
    return config if config is not None and is_dense(config) else None


class HostFlashAttentionImpl(FlashAttentionImpl):
    """See the module's docstring."""

    host: DenseLayer | None = None
    """Its layer, from when the worker half has registered the caches until that is closed."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        host = self.host
        if attn_metadata is None and host is None:  # vLLM measures how much memory is left for the cache
            hold_memory(_dense_config(), self.num_kv_heads, self.head_size)
        if attn_metadata is None or host is None:
            return self._stock(layer, query, key, value, kv_cache, attn_metadata, output)
        tokens = attn_metadata.num_actual_tokens
        decode_only = attn_metadata.max_query_len == 1
        # A graph is replayed for whatever batch there is.
        if decode_only and (host.runtime.differs or torch.cuda.is_current_stream_capturing()):
            self._decode(host, query[:tokens], attn_metadata, output[:tokens])
        elif host.runtime.differs:
            self._mixed(host, query[:tokens], kv_cache, attn_metadata, output[:tokens])
        else:
            return self._stock(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _stock(self, *args: Any) -> torch.Tensor:
        return super().forward(*args)

    def _decode(
        self, host: DenseLayer, query: torch.Tensor, md: FlashAttentionMetadata, output: torch.Tensor
    ) -> None:
        """query, output: [R, heads, dim]: a token for each of the first R requests."""
        rows = query.shape[0]
        lists = host.pick(query, md.seq_lens[:rows], md.block_table[:rows])
        group, dim = lists.query.shape[1:]
        if host.order == 0:  # the lists differ from layer to layer, not their lengths
            host.runtime.schedule = get_scheduler_metadata(
                batch_size=lists.query.shape[0],
                max_seqlen_q=1,
                max_seqlen_k=lists.longest,
                num_heads_q=group,
                num_heads_kv=1,
                headdim=dim,
                cache_seqlens=lists.lengths,
                qkv_dtype=query.dtype,
                cu_seqlens_q=lists.starts,
                page_size=host.pages.shape[1],
                causal=True,
                window_size=(-1, -1),
                num_splits=md.max_num_splits,
            )
        self._attend(
            lists.query,
            host.pages,
            output.view(-1, group, dim),
            lists.starts,
            lists.lengths,
            1,
            lists.longest,
            lists.table,
            host.runtime.schedule,
            md.max_num_splits,
        )

    def _mixed(
        self,
        host: DenseLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        md: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Decode rows over their lists, the others over their whole contexts."""
        decodes = host.runtime.decodes
        if decodes:
            self._decode(host, query[:decodes], md, output[:decodes])
        for part in host.runtime.prefill_parts():
            cache, table = self._context(host, part, kv_cache, md)
            self._attend(
                query[part.tokens],
                cache.transpose(1, 2),
                output[part.tokens],
                part.starts,
                part.lengths,
                part.longest_query,
                part.longest,
                table,
            )

    def _context(
        self, host: DenseLayer, part: PrefillPart, kv_cache: torch.Tensor, md: FlashAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache, [blocks, H, N, 2 * dim], and the block table of a part's contexts in it."""
        if part.staged is None:
            return kv_cache, md.block_table[part.rows]
        return host.stage(part, md.block_table), part.staged.table

    def _attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        longest_query: int,
        longest: int,
        table: torch.Tensor,
        schedule: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> None:
        """The stock kernel. cache: [pages, N, heads, 2 * dim]."""
        keys, values = cache.split(self.head_size, dim=-1)
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=longest_query,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule,
            fa_version=self.vllm_flash_attn_version,
            num_splits=num_splits,
        )


class HostFlashAttentionBuilder(FlashAttentionMetadataBuilder):
    """Only batches of decode steps are captured whole: others put contexts together outside of graphs."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class HostFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return HostFlashAttentionImpl if _dense_config() is not None else FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return HostFlashAttentionBuilder if _dense_config() is not None else FlashAttentionMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        config = _dense_config()
        if config is None or type(spec) is not FullAttentionSpec:
            return spec
        if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
            return spec  # check.py refuses it
        return as_host_backed(HostBackedSpec, spec, DensePlan.of_config(config))
