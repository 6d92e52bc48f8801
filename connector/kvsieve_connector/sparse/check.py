"""Start-up checks: sparse mode refuses to run on what it can't prove.

vLLM's plug points are taken by name and by subclassing; one that did not take would give wrong tokens, not an
error. So each is looked at before the first request.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import vllm

from kvsieve_connector.geometry import layer_specs
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.spec import HostBackedMLASpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def check_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Checks what both halves know. Raises ValueError, which says what to change."""
    SparsePlan.of_config(vllm_config)  # the model and the settings first: they are what a user chose
    if not getattr(vllm_config, "use_v2_model_runner", False):
        raise ValueError(
            f"kvsieve: sparse mode needs vLLM's V2 model runner, of vllm >= 0.33 on CUDA; this is vllm "
            f"{vllm.__version__}, and it has chosen the V1 runner (VLLM_USE_V2_MODEL_RUNNER="
            f"{os.environ.get('VLLM_USE_V2_MODEL_RUNNER', 'not set')}, or a feature that V2 lacks)"
        )
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise ValueError(
            "kvsieve: sparse mode does not support dual batch overlap; serve without --enable-dbo"
        )
    layout = str(kv_cache_config.kv_cache_layout)
    if "BLHNC" not in layout:
        raise ValueError(
            f"kvsieve: sparse mode needs the KV cache layout BLHNC, this engine has {layout}; unset "
            "VLLM_KV_CACHE_LAYOUT"
        )
    main, others = _split(kv_cache_config)
    if not main:
        raise ValueError(
            "kvsieve: no layer is host-backed: sparse mode is for DSA models (DeepSeek-V3.2, GLM-5.x) on the "
            "backends FLASHMLA_SPARSE, FLASH_ATTN_MLA_SPARSE and FLASHINFER_MLA_SPARSE"
        )
    if len(others) != 1:
        raise ValueError(
            "kvsieve: sparse mode expects one KV group beside those of host-backed layers, the indexer's; "
            f"this model has {len(others)}"
        )
    index = others[0]
    strangers = [
        name
        for name, spec in layer_specs(kv_cache_config.kv_cache_groups[index])
        if ".indexer." not in name and getattr(getattr(spec, "cache_role", None), "name", "") != "INDEXER"
    ]
    if strangers:
        raise ValueError(
            f"kvsieve: layers {', '.join(strangers[:4])} are not host-backed; their backend is not one that "
            "sparse mode knows (FLASHMLA_SPARSE, FLASH_ATTN_MLA_SPARSE, FLASHINFER_MLA_SPARSE)"
        )


def check_layers(vllm_config: VllmConfig, names: list[str]) -> None:
    """Checks, in a worker, that host-backed layers run our attention.

    Raises ValueError, which says what to change.
    """
    from kvsieve_connector.sparse.attention import HostBackedAttention

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    for name in names:
        impl = getattr(layers.get(name), "impl", None)
        if not isinstance(impl, HostBackedAttention):
            raise ValueError(
                f"kvsieve: layer {name} runs {type(impl).__name__}, which knows nothing of the arena; is the "
                "plug-in 'kvsieve' loaded in every process (VLLM_PLUGINS)?"
            )


def _split(kv_cache_config: KVCacheConfig) -> tuple[list[int], list[int]]:
    """KV groups of the host-backed layers, and the others."""
    main: list[int] = []
    others: list[int] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        backed = [isinstance(spec, HostBackedMLASpec) for _, spec in layer_specs(group)]
        if any(backed) and not all(backed):
            raise ValueError(
                f"kvsieve: KV group {index} mixes host-backed layers with others; this vLLM groups layers "
                "otherwise than 0.33"
            )
        (main if any(backed) else others).append(index)
    return main, others
