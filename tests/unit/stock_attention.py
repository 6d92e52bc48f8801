"""Sparse MLA implementations as vLLM 0.33 has them, as far as ours calls them, with attention in torch."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve_connector.kernels.gather_context_reference import to_bf16
from kvsieve_connector.sparse.attention import HostCommonSparseMLA, HostFlashMLA

HEADS, LATENT, WIDTH = 2, 512, 576


def attend(q: torch.Tensor, context: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """q: bf16 [T, HEADS, WIDTH]. context: bf16 [T, k, WIDTH]. there: bool [T, k].

    Returns bf16 [T, HEADS, LATENT], 0 where nothing is there.
    """
    keys = torch.where(there.unsqueeze(2), context, 0).float()
    scores = torch.einsum("thw,tkw->thk", q.float(), keys) / WIDTH**0.5
    weights = scores.masked_fill(~there.unsqueeze(1), float("-inf")).softmax(2).nan_to_num(0.0)
    # A NaN that was read must stay one.
    weights = torch.where(keys.isnan().any(2).unsqueeze(1), float("nan"), weights)
    return torch.einsum("thk,tkl->thl", weights, keys[..., :LATENT]).to(torch.bfloat16)


def attend_rows(
    q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """As a kernel does: rows [N, WIDTH] of a cache, indices int32 [T, k], and how many of them there are."""
    there = indices >= 0
    if counts is not None:
        assert torch.equal(counts, there.sum(1, dtype=torch.int32))
    return attend(q, rows[indices.clamp(min=0).long()], there)


def flat(cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """Rows of the cache, and rows between its blocks (vLLM's flat_kv_row_view)."""
    width = cache.shape[2]
    stride = cache.stride(0) // width
    return cache.as_strided(((cache.shape[0] - 1) * stride + block_size, width), (width, 1)), stride


def convert(md: Any, topk: torch.Tensor, stride_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock conversion of positions to rows: by the block table alone."""
    requests = md.req_id_per_token[: topk.shape[0]].long()
    asked = topk.clamp(min=0).long()
    blocks = md.block_table[requests].gather(1, asked // md.block_size)
    rows = torch.where(topk >= 0, blocks * stride_rows + asked % md.block_size, -1).to(torch.int32)
    return rows, (topk >= 0).sum(1, dtype=torch.int32)


class StockCommon:
    """SparseMLACommonImpl with a kernel of FlashAttention's or FlashInfer's kind."""

    group_conversion_decode_only = True

    def __init__(self, topk: torch.Tensor, leader: StockCommon | None = None) -> None:
        """leader: the layer whose list this one uses, if not its own."""
        self.topk_indices_buffer, self.num_heads, self.kv_cache_dtype = topk, HEADS, "auto"
        self.leader = leader
        self.converted: Any = None
        self.stock_conversions = 0

    def _convert_logical_to_physical_topk(
        self, topk: torch.Tensor, md: Any, *, block_stride_rows: int | None, return_valid_counts: bool
    ) -> Any:
        """Once for all layers that share a list, by the leader's block table."""
        self.stock_conversions += 1
        if self.leader is None:
            self.converted = convert(md, topk, block_stride_rows or md.block_size)
        rows, counts = (self.leader or self).converted
        return (rows, counts) if return_valid_counts else rows

    def forward_mqa(self, q: Any, cache: torch.Tensor, md: Any, layer: Any) -> tuple[torch.Tensor, None]:
        tokens = q[0].shape[0]
        topk, stride = self.topk_indices_buffer[:tokens], flat(cache, md.block_size)[1]
        is_decode = md.num_decode_tokens >= tokens
        if self.group_conversion_decode_only:
            self.stock_conversions += 1
            rows, counts = convert(md, topk, stride)
        else:
            rows, counts = self._convert_logical_to_physical_topk(
                topk, md, block_stride_rows=stride, return_valid_counts=True
            )
        return self._forward_mqa_kernel(
            q, cache, rows, counts, layer=layer, block_size=md.block_size, is_decode=is_decode
        )

    def _forward_mqa_kernel(
        self,
        q: Any,
        cache: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, None]:
        return attend_rows(torch.cat(q, 2), flat(cache, block_size)[0], rows, counts), None


class StockFlashMLA(StockCommon):
    """FlashMLASparseImpl, with separate kernels for decode and prefill."""

    packed = False

    def __init__(self, topk: torch.Tensor, workspace_rows: int) -> None:
        super().__init__(topk)
        self.kv_cache_dtype = "fp8_ds_mla" if self.packed else "auto"
        self.workspace_specs = [
            ((topk.shape[0], HEADS, WIDTH), torch.bfloat16),
            ((workspace_rows, WIDTH), torch.bfloat16),
        ]

    def forward_mqa(self, q: Any, cache: torch.Tensor, md: Any, layer: Any) -> tuple[torch.Tensor, None]:
        q = torch.cat(q, 2)
        topk, stride = self.topk_indices_buffer[: q.shape[0]], flat(cache, md.block_size)[1]
        if md.num_decode_tokens < q.shape[0]:
            rows, counts = convert(md, topk, stride)
            context = flat(cache, md.block_size)[0]
            context = to_bf16(context) if self.packed else context
            return self._bf16_flash_mla_kernel(q, context, rows, counts, HEADS)[0], None
        rows, counts = self._convert_logical_to_physical_topk(
            topk, md, block_stride_rows=None if self.packed else stride, return_valid_counts=True
        )
        if not self.packed:
            context = flat(cache, md.block_size)[0]
            return self._bf16_flash_mla_kernel(q, context, rows, counts, HEADS)[0], None
        shape = (md.num_decodes, q.shape[0] // md.num_decodes)
        out, _ = self._fp8_flash_mla_kernel(
            q=q.view(*shape, HEADS, WIDTH),
            kv_c_and_k_pe_cache=cache,
            topk_indices=rows.view(*shape, -1),
            kernel_metadata=md.fp8_extra_metadata.decode.kernel_metadata,
        )
        return out.reshape(q.shape[0], HEADS, LATENT), None

    def _bf16_flash_mla_kernel(
        self, q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, None]:
        assert heads == HEADS
        return attend_rows(q, rows, indices, counts), None

    def _fp8_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        kernel_metadata: Any,
    ) -> tuple[torch.Tensor, None]:
        """Its index is page * 64 + row, however far the pages lie apart."""
        assert kernel_metadata == "decode"
        batch, tokens = topk_indices.shape[:2]
        indices = topk_indices.reshape(batch * tokens, -1)
        places = indices.clamp(min=0).long()
        context = to_bf16(kv_c_and_k_pe_cache[places // 64, places % 64].view(-1, 656))
        out = attend(q.reshape(-1, HEADS, WIDTH), context.view(*indices.shape, WIDTH), indices >= 0)
        return out.view(batch, tokens, HEADS, LATENT), None


class Common(HostCommonSparseMLA, StockCommon):
    pass


class FlashMLA(HostFlashMLA, StockFlashMLA):
    pass


class PackedFlashMLA(HostFlashMLA, StockFlashMLA):
    packed = True
