"""Start-up checks of a worker on a GPU: sparse mode on a dense model refuses what it can't prove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs

from kvsieve_connector.dense.check import check_sharing, stranger
from kvsieve_connector.dense.gpu.backend import HostFlashAttentionImpl
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.kernels.block_tables import DTYPES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_layers(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], plan: DensePlan) -> None:
    """As dense.check.check_layers()."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    check_sharing(layers)
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError("kvsieve: sparse mode of dense models does not support VLLM_BATCH_INVARIANT")
    for name, cache in kv_caches.items():
        impl = getattr(layers.get(name), "impl", None)
        if not isinstance(impl, HostFlashAttentionImpl):
            raise stranger(name, impl)
        if impl.vllm_flash_attn_version != 3:
            raise ValueError(
                f"kvsieve: sparse mode of dense models needs FlashAttention 3 (Hopper GPUs), {name} runs "
                f"FlashAttention {impl.vllm_flash_attn_version}"
            )
        if cache.dtype not in DTYPES:
            raise ValueError(
                "kvsieve: sparse mode of dense models on a GPU needs a cache of bfloat16 or float16, "
                f"{name} has {cache.dtype}"
            )
        found = {
            "ALiBi": impl.alibi_slopes is not None,
            "sliding windows": impl.sliding_window != (-1, -1),
            "attention sinks": impl.sinks is not None,
        }
        for feature, there in found.items():
            if there:
                raise ValueError(
                    f"kvsieve: sparse mode of dense models does not support {feature}: {name} has them"
                )
        shape = (impl.num_kv_heads, plan.block_tokens, 2 * impl.head_size)
        size = shape[1] * shape[2]
        whole = cache.stride()[1:] == (size, shape[2], 1) and cache.stride(0) % size == 0
        if tuple(cache.shape[1:]) != shape or not whole:
            raise ValueError(
                f"kvsieve: layer {name} has a cache of shape {tuple(cache.shape)}, strides {cache.stride()}; "
                f"blocks of {shape} expected, of heads that follow one another; unset VLLM_KV_CACHE_LAYOUT"
            )
