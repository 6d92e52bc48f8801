"""vLLM's FlashAttention over host-backed requests, under the same name.

plugin.py puts this in place of the stock class. An engine that is not in sparse mode gets the stock
implementation, builder and spec from it.

Decode: each request and KV head is a row of its own for the stock kernel, with a block table of what it
attends to, in the layer's cache seen as pages of one head. That works inside full CUDA graphs. Prefill over
a context that is not all in the pool: its pages are put together in a staging buffer, layer by layer. A batch
in which no request picks, or reads the arena, takes the stock path.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvsieve_connector.dense.building import dense_config, host_backed_in_sparse_mode
from kvsieve_connector.dense.gpu.memory import hold_memory
from kvsieve_connector.dense.gpu.runtime import DenseLayer, PrefillPart


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
            hold_memory(dense_config(), self.num_kv_heads, self.head_size)
        decode_only = attn_metadata is not None and attn_metadata.max_query_len == 1
        # A graph is replayed for whatever batch there is.
        captures = decode_only and torch.cuda.is_current_stream_capturing()
        scaled = output_scale is not None or output_block_scale is not None  # which stock refuses
        if attn_metadata is None or host is None or scaled or not (host.runtime.differs or captures):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        tokens = attn_metadata.num_actual_tokens
        if decode_only:
            self._decode(host, query[:tokens], attn_metadata, output[:tokens])
        else:
            self._mixed(host, query[:tokens], kv_cache, attn_metadata, output[:tokens])
        return output

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


class HostFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return HostFlashAttentionImpl if dense_config() is not None else FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return HostFlashAttentionBuilder if dense_config() is not None else FlashAttentionMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return host_backed_in_sparse_mode(super().customize_spec(spec))
