"""vLLM's sparse MLA backends with a host-backed main plane, under the same names.

plugin.py puts these in place of the stock classes. An engine that is not in sparse mode gets the stock
implementation, builder and spec from them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
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
)
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from kvsieve_connector.sparse.attention import HostCommonSparseMLA, HostFlashMLA
from kvsieve_connector.sparse.plan import SparsePlan, sparse_wanted
from kvsieve_connector.sparse.runtime import LATENT_WIDTH, workspace_rows
from kvsieve_connector.sparse.spec import to_host_backed

_config: VllmConfig | None = None
"""Of the engine whose model was built last in this process: vLLM asks for specs outside its configuration,
and has settled the block size only by then."""


def _sparse() -> bool:
    """Whether the engine being built is in sparse mode."""
    global _config
    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None:
        _config = config
    return _config is not None and sparse_wanted(_config)


class _HostBackend:
    """Mixed in before a stock backend."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)  # type: ignore[misc]
        if not _sparse() or type(spec) is not MLAAttentionSpec:
            return spec
        assert _config is not None
        return to_host_backed(spec, SparsePlan.of_config(_config))


class _HostBuilder:
    """Mixed in before a stock metadata builder: only rows of decode steps count as decodes, of equal number
    per request, because the hot buffer has room for no more."""

    require_uniform_decodes = True
    reorder_batch_threshold: int | None
    """Most tokens of a request that are a decode step; vLLM adds a drafter's to the 1 given here."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        """Raises ValueError when vLLM counts other batches as decodes than those of decode steps."""
        # Dense prefill reads the paged cache, of which parts may be in the arena.
        vllm_config.attention_config.sparse_mla_force_mqa = True
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        # FlashMLA's mixed batch is one kernel call for decode and prefill: they need different caches here.
        self.fp8_use_mixed_batch = False
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


class HostFlashMLASparseImpl(HostFlashMLA, FlashMLASparseImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._packed:
            rows = workspace_rows(get_current_vllm_config())
            self.workspace_specs.append(((rows, LATENT_WIDTH), torch.bfloat16))
            current_workspace_manager().get_simultaneous(*self.workspace_specs)


class HostFlashMLASparseBuilder(_HostBuilder, FlashMLASparseMetadataBuilder):
    pass


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
