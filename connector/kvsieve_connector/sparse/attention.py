"""Sparse MLA attention over a cache of which most rows lie in the arena.

Decode: the stock implementation runs as it is; only its conversion of top-k positions to rows of the cache
is replaced by the swap-in, so that it works inside full CUDA graphs. Prefill over a context that the GPU does
not hold: contexts are gathered into a workspace, and the stock prefill kernel runs over that. A batch whose
contexts are all on the GPU takes the stock path throughout.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from kvsieve_connector.sparse.runtime import LATENT_WIDTH, HostLayer, PrefillGroup

Query: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""[T, heads, 576], or its parts [T, heads, 512] and [T, heads, 64]."""


def rows_of(q: Query, tokens: slice) -> Query:
    """The query of some tokens."""
    return (q[0][tokens], q[1][tokens]) if isinstance(q, tuple) else q[tokens]


def count_of(q: Query) -> int:
    """Tokens of a query."""
    return q[0].shape[0] if isinstance(q, tuple) else q.shape[0]


class HostBackedAttention:
    """Mixed in before a stock sparse MLA implementation. Subclasses say how its kernels are called."""

    host: HostLayer | None = None
    """Its layer, from when the worker half has registered the caches until that is closed."""
    _layer: HostLayer | None = None

    def forward_mqa(
        self, q: Query, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        host = self._layer = self.host
        decode_only = attn_metadata.num_decode_tokens >= count_of(q)
        if host is None or decode_only or not host.runtime.reads_host:
            self._layer = host if decode_only else None
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]
        return self._forward_mixed(q, kv_c_and_k_pe_cache, attn_metadata, layer, host), None

    def _convert_logical_to_physical_topk(
        self,
        logical_topk_indices: torch.Tensor,
        attn_metadata: Any,
        *,
        block_stride_rows: int | None,
        return_valid_counts: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self._layer is None:
            return super()._convert_logical_to_physical_topk(  # type: ignore[misc]
                logical_topk_indices,
                attn_metadata,
                block_stride_rows=block_stride_rows,
                return_valid_counts=return_valid_counts,
            )
        rows, counts = self._layer.swap_in(
            logical_topk_indices,
            attn_metadata.block_table[: attn_metadata.num_decodes],
            block_stride_rows or attn_metadata.block_size,
        )
        return (rows, counts) if return_valid_counts else rows

    def _forward_mixed(
        self, q: Query, cache: torch.Tensor, md: Any, layer: Any, host: HostLayer
    ) -> torch.Tensor:
        """Decode rows through the hot buffer, prefill rows over gathered contexts."""
        topk = self.topk_indices_buffer[: count_of(q)]  # type: ignore[attr-defined]
        q = self._joined(q)
        parts = []
        decodes = md.num_decode_tokens
        if decodes:
            rows, counts = host.swap_in(
                topk[:decodes], md.block_table[: md.num_decodes], self._stride_rows(cache, md)
            )
            parts.append(self._attend_cache(rows_of(q, slice(0, decodes)), cache, rows, counts, md, layer))
        for group in host.runtime.prefill_groups(md.num_decodes):
            context = host.gather(group, md.block_table, self._workspace(host))
            rows, counts = _rows_of_context(topk[group.tokens], group)
            parts.append(self._attend_rows(rows_of(q, group.tokens), context, rows, counts, md, layer))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    # What differs between backends

    def _joined(self, q: Query) -> Query:
        """The query in the form that the kernels take."""
        return q

    def _stride_rows(self, cache: torch.Tensor, md: Any) -> int:
        """Rows between two blocks of the cache, as the kernels count them."""
        raise NotImplementedError

    def _workspace(self, host: HostLayer) -> torch.Tensor:
        """bf16 [rows, 576] for gathered contexts, which nothing else uses until the layer is done."""
        raise NotImplementedError

    def _attend_cache(
        self, q: Query, cache: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        """Decode attention over rows of the paged cache: [T, heads, 512]."""
        raise NotImplementedError

    def _attend_rows(
        self, q: Query, context: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        """Prefill attention over rows of a bf16 [N, 576] context: [T, heads, 512]."""
        raise NotImplementedError


def _rows_of_context(topk: torch.Tensor, group: PrefillGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int32 [T, k] to rows of the gathered contexts, and how many there are, int32 [T]."""
    there = topk >= 0
    rows = torch.where(there, topk + group.token_starts, -1)
    return rows, there.sum(1, dtype=torch.int32)


class HostFlashMLA(HostBackedAttention):
    """FlashMLA: fp8_ds_mla or bf16 rows."""

    def _joined(self, q: Query) -> Query:
        from vllm import _custom_ops as ops
        from vllm.v1.worker.workspace import current_workspace_manager

        if not isinstance(q, tuple):
            return q
        nope, rope = q
        joined, *_ = current_workspace_manager().get_simultaneous(*self.workspace_specs)  # type: ignore[attr-defined]
        joined = joined[: nope.shape[0]]
        ops.concat_mla_q(nope, rope, joined)
        return joined

    def _stride_rows(self, cache: torch.Tensor, md: Any) -> int:
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

        if self._packed and md.block_size == 64:
            return 64
        return int(flat_kv_row_view(cache, md.block_size)[1])

    def _workspace(self, host: HostLayer) -> torch.Tensor:
        from vllm.v1.worker.workspace import current_workspace_manager

        _, workspace, *_ = current_workspace_manager().get_simultaneous(*self.workspace_specs)  # type: ignore[attr-defined]
        return workspace

    def _attend_cache(
        self, q: Query, cache: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

        assert isinstance(q, torch.Tensor)
        if not self._packed:
            flat, _ = flat_kv_row_view(cache, md.block_size)
            heads = self.num_heads  # type: ignore[attr-defined]
            return self._bf16_flash_mla_kernel(q, flat, rows, counts, heads)[0]  # type: ignore[attr-defined]
        per_request = q.shape[0] // md.num_decodes
        out, _ = self._fp8_flash_mla_kernel(  # type: ignore[attr-defined]
            q=q.view(md.num_decodes, per_request, *q.shape[1:]),
            kv_c_and_k_pe_cache=self._pages(cache, md),
            topk_indices=rows.view(md.num_decodes, per_request, -1),
            kernel_metadata=md.fp8_extra_metadata.decode.kernel_metadata,
        )
        return out.reshape(q.shape[0], *out.shape[2:])

    def _attend_rows(
        self, q: Query, context: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        assert isinstance(q, torch.Tensor)
        heads = self.num_heads  # type: ignore[attr-defined]
        return self._bf16_flash_mla_kernel(q, context, rows, counts, heads)[0]  # type: ignore[attr-defined]

    @property
    def _packed(self) -> bool:
        return bool(self.kv_cache_dtype == "fp8_ds_mla")  # type: ignore[attr-defined]

    def _pages(self, cache: torch.Tensor, md: Any) -> torch.Tensor:
        from vllm.v1.attention.backends.mla.flashmla_sparse import _fp8_kv_pages

        return _fp8_kv_pages(cache, md.block_size)[0]


class HostCommonSparseMLA(HostBackedAttention):
    """Backends whose kernel is behind SparseMLACommonImpl._forward_mqa_kernel: FlashAttention, FlashInfer."""

    @property
    def group_conversion_decode_only(self) -> bool:
        """False: rows come from _convert_logical_to_physical_topk, so from the swap-in.

        Elsewhere each layer converts by its own block table: stock shares what the leader of an index has
        converted, but here layers that share an index may be in different KV groups.
        """
        return self._layer is None

    def _stride_rows(self, cache: torch.Tensor, md: Any) -> int:
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

        return int(flat_kv_row_view(cache, md.block_size)[1])

    def _workspace(self, host: HostLayer) -> torch.Tensor:
        from vllm.v1.worker.workspace import current_workspace_manager

        shape = (host.runtime.workspace_rows, LATENT_WIDTH)
        (workspace,) = current_workspace_manager().get_simultaneous((shape, torch.bfloat16))
        return workspace

    def _attend_cache(
        self, q: Query, cache: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        return self._forward_mqa_kernel(  # type: ignore[attr-defined]
            q, cache, rows, counts, layer=layer, block_size=md.block_size, is_decode=True
        )[0]

    def _attend_rows(
        self, q: Query, context: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, md: Any, layer: Any
    ) -> torch.Tensor:
        return self._forward_mqa_kernel(  # type: ignore[attr-defined]
            q, context.unsqueeze(0), rows, counts, layer=layer, block_size=context.shape[0], is_decode=False
        )[0]
