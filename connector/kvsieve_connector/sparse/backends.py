"""vLLM's sparse MLA backends with a host-backed main plane, under the same names.

plugin.py puts these in place of the stock classes. An engine that is not in sparse mode gets the stock
implementation, builder and spec from them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseImpl,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseImpl,
    FlashInferMLASparseTRTLLMBackend,
    FlashInferMLASparseTRTLLMMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
    get_mla_metadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from kvsieve_connector.sparse.attention import HostCommonSparseMLA, HostFlashMLA
from kvsieve_connector.sparse.building import sparse_config
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.runtime import LATENT_WIDTH, workspace_rows
from kvsieve_connector.sparse.spec import to_host_backed


def _sparse() -> bool:
    """Whether the engine being built is in sparse mode."""
    return sparse_config() is not None


class _HostBackend:
    """Mixed in before a stock backend."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)  # type: ignore[misc]
        config = sparse_config()
        if config is None or type(spec) is not MLAAttentionSpec:
            return spec
        return to_host_backed(spec, SparsePlan.of_config(config))


class _HostBuilder:
    """Mixed in before a stock metadata builder: only rows of decode steps count as decodes, of equal number
    per request, because the hot buffer has room for no more.

    Each main group has a builder, and all groups of a batch differ in their blocks only: the first builds,
    the others take over what it has built.
    """

    require_uniform_decodes = True
    _built: ClassVar[tuple[Any, Any] | None] = None
    """The last batch, as the first group got it, and its metadata; one for each subclass."""
    reorder_batch_threshold: int | None
    """Most tokens of a request that are a decode step; vLLM adds a drafter's to the 1 given here."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        """Raises ValueError when vLLM counts other batches as decodes than those of decode steps."""
        # Dense prefill reads the paged cache, of which parts may be in the arena.
        vllm_config.attention_config.sparse_mla_force_mqa = True
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        # What dense prefill needs is neither built nor held.
        self._prefill_backend = None
        self.chunked_prefill_workspace = torch.empty(0, device=device)
        # FlashMLA's mixed batch is one kernel call for decode and prefill: they need different caches here.
        self.fp8_use_mixed_batch = False
        self._has_drafter = bool(vllm_config.num_speculative_tokens)
        # A decode step that counted as a prefill would be captured into graphs as vLLM's own attention.
        found, wanted = self.reorder_batch_threshold, 1 + vllm_config.num_speculative_tokens
        if found != wanted:
            raise ValueError(
                f"kvsieve: sparse mode: vLLM takes up to {found} tokens of a request for a decode step, with "
                f"num_speculative_tokens={wanted - 1} it must be {wanted}; this vLLM differs from 0.33"
            )

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, *args: Any, **kwargs: Any
    ) -> None:
        super()._init_reorder_batch_threshold(1, *args, **kwargs)  # type: ignore[misc]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = type(self)._built
        if found is not None and _is_same_batch(found[0], common_attn_metadata):
            return self._with_blocks(found[1], common_attn_metadata)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        type(self)._built = common_attn_metadata, metadata
        return metadata

    def _with_blocks(self, metadata: Any, common: Any) -> Any:
        """The metadata of another group of the same batch, for this one."""
        return _changed(
            metadata,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            req_id_per_token=self._build_req_id_per_token(common),  # type: ignore[attr-defined]
        )


def _changed(one: Any, **fields: Any) -> Any:
    """dataclasses.replace() without the constructor, which would take longer than all else in a step's
    builds."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__, **fields)
    return other


def _is_same_batch(one: Any, other: Any) -> bool:
    """Whether vLLM made both for one batch. It makes these tensors anew for each."""
    return (
        one.seq_lens is other.seq_lens
        and one.query_start_loc is other.query_start_loc
        and (one.num_reqs, one.num_actual_tokens, one.max_query_len)
        == (other.num_reqs, other.num_actual_tokens, other.max_query_len)
    )


class HostFlashMLASparseImpl(HostFlashMLA, FlashMLASparseImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._packed:
            rows = workspace_rows(get_current_vllm_config())
            self.workspace_specs.append(((rows, LATENT_WIDTH), torch.bfloat16))
            current_workspace_manager().get_simultaneous(*self.workspace_specs)


class HostFlashMLASparseBuilder(_HostBuilder, FlashMLASparseMetadataBuilder):
    def _with_blocks(self, metadata: Any, common: Any) -> Any:
        own, fp8 = super()._with_blocks(metadata, common), metadata.fp8_extra_metadata
        if fp8 is None:
            return own
        prefill, decode = fp8.prefill, fp8.decode
        if prefill is not None:
            tables = own.block_table[own.num_decodes :]
            chunks = [
                _changed(chunk, block_table=tables[first : first + len(chunk.block_table)])
                for chunk in prefill.chunks
                for first in (chunk.req_start_idx,)
            ]
            prefill = _changed(prefill, chunks=chunks)
        if decode is not None and self._has_drafter:
            # The kernel fills this in at the first layer that has it. A drafter's graphs keep what was there
            # at their capture, and the model's may have gone on to use that memory otherwise.
            scheduler, _ = get_mla_metadata()
            kernel = _changed(decode.kernel_metadata, scheduler_metadata=scheduler)
            decode = _changed(decode, kernel_metadata=kernel)
        if prefill is not fp8.prefill or decode is not fp8.decode:
            own.fp8_extra_metadata = _changed(fp8, prefill=prefill, decode=decode)
        return own


class HostFlashMLASparseBackend(_HostBackend, FlashMLASparseBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashMLASparseImpl]:
        return HostFlashMLASparseImpl if _sparse() else FlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMLASparseMetadataBuilder]:
        return HostFlashMLASparseBuilder if _sparse() else FlashMLASparseMetadataBuilder


class _ReservesWorkspace:
    """Mixed in before an implementation without a workspace of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = workspace_rows(get_current_vllm_config())
        current_workspace_manager().get_simultaneous(((rows, LATENT_WIDTH), torch.bfloat16))


class HostFlashAttnMLASparseImpl(HostCommonSparseMLA, _ReservesWorkspace, FlashAttnMLASparseImpl):
    pass


class HostFlashAttnMLASparseBuilder(_HostBuilder, FlashAttnMLASparseMetadataBuilder):
    pass


class HostFlashAttnMLASparseBackend(_HostBackend, FlashAttnMLASparseBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return HostFlashAttnMLASparseImpl if _sparse() else FlashAttnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMLASparseMetadataBuilder]:
        return HostFlashAttnMLASparseBuilder if _sparse() else FlashAttnMLASparseMetadataBuilder


class HostFlashInferMLASparseImpl(HostCommonSparseMLA, _ReservesWorkspace, FlashInferMLASparseImpl):
    """The default on Blackwell. Not run on such a device yet."""


class HostFlashInferMLASparseBuilder(_HostBuilder, FlashInferMLASparseTRTLLMMetadataBuilder):
    pass


class HostFlashInferMLASparseBackend(_HostBackend, FlashInferMLASparseTRTLLMBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return HostFlashInferMLASparseImpl if _sparse() else FlashInferMLASparseTRTLLMBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> Any:
        return (
            HostFlashInferMLASparseBuilder
            if _sparse()
            else FlashInferMLASparseTRTLLMBackend.get_builder_cls()
        )
