"""Start-up checks: sparse mode on a dense model refuses to run on what it can't prove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.geometry import layer_specs
from kvsieve_connector.sparse.spec import HostBackedSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

BACKENDS = {"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"}
"""vLLM's attention backends that sparse mode of dense models stands in for, by device."""


def check_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Checks what both halves know. Raises ValueError, which says what to change."""
    DensePlan.of_config(vllm_config)  # the settings first: they are what a user chose
    if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
        raise ValueError(
            "kvsieve: sparse mode of dense models does not support models with prefix-LM attention"
        )
    device = vllm_config.device_config.device_type
    if device not in BACKENDS:
        raise ValueError(
            "kvsieve: sparse mode of dense models runs on CPUs and NVIDIA GPUs, this engine is on "
            f"{device!r}; use mode 'cache'"
        )
    _check_runner(device, bool(getattr(vllm_config, "use_v2_model_runner", False)))
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise ValueError(
            "kvsieve: sparse mode does not support dual batch overlap; serve without --enable-dbo"
        )
    groups = kv_cache_config.kv_cache_groups
    strangers = [
        (name, spec)
        for group in groups
        for name, spec in layer_specs(group)
        if not isinstance(spec, HostBackedSpec)
    ]
    if strangers:
        name, spec = strangers[0]
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        reason = f"attends to a window of {window} tokens" if window else f"keeps a {type(spec).__name__}"
        raise ValueError(
            "kvsieve: sparse mode of dense models needs full, causal attention of the backend "
            f"{BACKENDS[device]} in all layers; {name} {reason} ({len(strangers)} layers like it). Is the "
            "plug-in 'kvsieve' loaded in every process (VLLM_PLUGINS)? If it is, use mode 'cache'"
        )
    if len(groups) != 1:
        raise ValueError(
            f"kvsieve: sparse mode of dense models needs one KV group, this model has {len(groups)}; use "
            "mode 'cache'"
        )


def _check_runner(device: str, is_v2: bool) -> None:
    """The CPU's backend knows its batch from the V1 runner's metadata, the GPU's is told by the V2 runner."""
    if is_v2 == (device == "cuda"):
        return
    wanted, chosen, value = ("V2", "V1", 1) if device == "cuda" else ("V1", "V2", 0)
    raise ValueError(
        f"kvsieve: sparse mode of dense models on {device} needs vLLM's {wanted} model runner; vllm "
        f"{vllm.__version__} has chosen the {chosen} runner; set VLLM_USE_V2_MODEL_RUNNER={value}"
    )


def check_layers(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], plan: DensePlan) -> None:
    """Checks, in a worker, that each layer runs our attention over a cache that we can read.

    Raises ValueError, which says what to change.
    """
    from kvsieve_connector.dense.backend import HostCPUAttentionImpl

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    check_sharing(layers)
    for name, cache in kv_caches.items():
        impl = getattr(layers.get(name), "impl", None)
        if not isinstance(impl, HostCPUAttentionImpl):
            raise stranger(name, impl)
        if impl.alibi_slopes is not None or impl.sliding_window != -1:
            raise ValueError(
                f"kvsieve: sparse mode of dense models does not support ALiBi or sliding windows: {name} has "
                "them"
            )
        shape = (impl.num_kv_heads, plan.block_tokens, 2 * impl.head_size)
        if tuple(cache.shape[1:]) != shape or not cache.is_contiguous():
            raise ValueError(
                f"kvsieve: layer {name} has a cache of shape {tuple(cache.shape)}, strides {cache.stride()}; "
                f"blocks of {shape} expected: KV heads, tokens, K and V"
            )


def check_sharing(layers: dict[str, Any]) -> None:
    """Raises ValueError when layers share a cache."""
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            raise ValueError(
                f"kvsieve: sparse mode of dense models does not support layers that share a cache: {name}"
            )


def stranger(name: str, impl: object) -> ValueError:
    """The error for a layer that runs some other attention."""
    return ValueError(
        f"kvsieve: layer {name} runs {type(impl).__name__}, which knows nothing of the arena; is the "
        "plug-in 'kvsieve' loaded in every process (VLLM_PLUGINS)?"
    )
