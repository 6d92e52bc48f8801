"""Where a block's bytes lie in a worker's paged cache, and the pool spec that follows from it.

vLLM places layer l's page of block b at `offset + l * layer_stride + b * block_stride` of an allocation
(KVCacheTensor, vllm/v1/kv_cache_interface.py); a page holds the group's `block_size` tokens. One block of the
store holds `block_tokens` tokens: the least common multiple over the groups, so that every group
contributes whole pages.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from kvsieve_connector.heads import cuts
from kvsieve_store.protocol.spec import Plane, PoolSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAIN, INDEXER = "main", "indexer"
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".gguf"}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's part of a block of the store.

    group: index of the KV group, whose block ids name this layer's pages.
    page_bytes: bytes of one page; pages: pages in one block of the store.
    heads, head_runs: KV heads of the layer over all ranks, and how often this rank's follow one another in a
    page; 0 where a page can't be cut between them (heads.py).
    """

    name: str
    plane: str
    group: int
    page_bytes: int
    pages: int
    replicated: bool
    heads: int = 0
    head_runs: int = 0

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.pages


@dataclass(frozen=True, slots=True)
class WorkerGeometry:
    """All layers of a worker, in slot order, and how many tokens a block of the store holds."""

    block_tokens: int
    layout: str
    layers: tuple[LayerGeometry, ...]

    def planes(self, tp_size: int) -> tuple[Plane, ...]:
        """Planes in slot order. A plane is sharded unless all its layers are replicated over TP ranks."""
        result = []
        for name in (MAIN, INDEXER):
            layers = [layer for layer in self.layers if layer.plane == name]
            if layers:
                shards = 1 if all(layer.replicated for layer in layers) else tp_size
                found = {(layer.heads, layer.head_runs * layer.pages) for layer in layers}
                heads = found.pop() if len(found) == 1 else (0, 0)
                result.append(Plane(name, tuple(layer.block_bytes for layer in layers), shards, *heads))
        return tuple(result)


def group_block_tokens(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Tokens of one vLLM block in each KV group."""
    return tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)


def store_block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block of the store: the least common multiple over the groups."""
    return math.lcm(*group_block_tokens(kv_cache_config))


def layer_specs(group: KVCacheGroupSpec) -> list[tuple[str, KVCacheSpec]]:
    """Name and own spec of each layer of a KV group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.items())
    return [(name, spec) for name in group.layer_names]


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ValueError, with the reason, for an engine whose KV this connector can't store."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise ValueError(f"kvsieve: kv_role={transfer.kv_role!r} is not supported, only 'kv_both'")
    parallel = vllm_config.parallel_config
    for field in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, field, 1)) > 1:
            raise ValueError(f"kvsieve: {field}={size} is not supported, only 1")
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError("kvsieve: sleep mode is not supported: the paged cache must stay where it is")
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in layer_specs(group):
            if not isinstance(spec, AttentionSpec) or isinstance(
                spec, CrossAttentionSpec | EncoderOnlyAttentionSpec
            ):
                raise ValueError(
                    f"kvsieve: layer {name} keeps a {type(spec).__name__}, which is not addressed by token "
                    "blocks; serve this model without kvsieve"
                )


def worker_geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> tuple[WorkerGeometry, dict[str, torch.Tensor]]:
    """The geometry, and per layer a view of its pages: uint8 [num_blocks, page_bytes], rows contiguous.

    kv_caches: as given to `register_kv_caches`, layer name -> tensor. Layers that share another layer's
    cache are not in a KV group's own list of tensors and are left out.
    """
    block_tokens = store_block_tokens(kv_cache_config)
    strides = {
        name: tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers
    }
    layers, views = [], {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in layer_specs(group):
            if name not in strides:
                continue
            heads, head_runs = cuts(vllm_config, kv_cache_config, spec, kv_caches[name])
            layers.append(
                LayerGeometry(
                    name=name,
                    plane=INDEXER if _is_indexer(name, spec) else MAIN,
                    group=index,
                    page_bytes=spec.page_size_bytes,
                    pages=block_tokens // group.kv_cache_spec.block_size,
                    replicated=isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec),
                    heads=heads,
                    head_runs=head_runs,
                )
            )
            views[name] = _page_view(
                name, kv_caches[name], kv_cache_config.num_blocks, spec.page_size_bytes, strides[name]
            )
    layers.sort(key=lambda layer: (layer.plane != MAIN, _natural(layer.name)))
    layout = f"{kv_cache_config.kv_cache_layout or 'default'}/{_backend_of(vllm_config, kv_caches)}"
    return WorkerGeometry(block_tokens, layout, tuple(layers)), views


def pool_spec(
    vllm_config: VllmConfig,
    geometry: WorkerGeometry,
    hash_seed: str,
    *,
    name: str | None = None,
    model_id: str | None = None,
    attention: str = "",
) -> PoolSpec:
    """The fingerprint of this engine's blocks.

    hash_seed: seed of vLLM's hash chain. name: the pool's; None: the model's. model_id: what the weights are
    known by; None: the path, and the files there. attention: how it is approximated: what is decoded so has
    other keys and values than what is computed exactly, under the same hashes.

    Raises ValueError for a hash whose keys are not 32 bytes.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not cache.prefix_caching_hash_algo.startswith("sha256"):
        raise ValueError(
            f"kvsieve: prefix_caching_hash_algo={cache.prefix_caching_hash_algo!r} is not supported: keys "
            "must be 32 bytes and the same in every process; use --prefix-caching-hash-algo sha256_cbor"
        )
    dtype = cache.cache_dtype if cache.cache_dtype != "auto" else str(model.dtype).removeprefix("torch.")
    planes = geometry.planes(vllm_config.parallel_config.tensor_parallel_size)
    known = model_id or model.model
    parts = [known, model_digest(vllm_config, with_files=model_id is None)]
    return PoolSpec(
        name=name or _default_name(known, attention),
        model=" ".join([*parts, f"({attention})"] if attention else parts),
        dtype=dtype,
        block_tokens=geometry.block_tokens,
        hash_algo=cache.prefix_caching_hash_algo,
        hash_seed=hash_seed,
        layout=geometry.layout,
        tp_size=max(plane.shards for plane in planes),  # 1 where each rank has the blocks whole
        planes=planes,
    )


def _default_name(model: str, attention: str) -> str:
    """Of a pool: at most 256 characters where the model's own are."""
    suffix = f" ({attention})" if attention else ""
    return model[: max(256 - len(suffix), 0)] + suffix


def model_digest(vllm_config: VllmConfig, with_files: bool) -> str:
    """16 hex digits over what else decides the values in the cache: the model's configuration with overrides,
    its dtype and quantization, its revision, and, if wanted, of a local model its files' names, sizes and
    times."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    parts: dict[str, object] = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "revision": model.revision,
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if "dummy" in str(vllm_config.load_config.load_format) else None,
    }
    folder = Path(model.model)
    if with_files and folder.is_dir():
        weights = (path for path in sorted(folder.iterdir()) if path.suffix in WEIGHT_FILES)
        parts["files"] = [(path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in weights]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_indexer(name: str, spec: AttentionSpec) -> bool:
    role = getattr(spec, "cache_role", None)
    return getattr(role, "name", "") == "INDEXER" or ".indexer." in name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _page_view(
    name: str, cache: torch.Tensor, num_blocks: int, page_bytes: int, block_stride: int
) -> torch.Tensor:
    # vLLM may show a block as several smaller ones, but blocks come first, so many bytes apart.
    shown = cache.shape[0] // num_blocks
    if cache.shape[0] % num_blocks or cache.stride(0) * cache.element_size() * shown != block_stride:
        raise ValueError(
            f"kvsieve: layer {name}: cache of shape {tuple(cache.shape)}, strides {cache.stride()}, does not "
            f"lay {num_blocks} blocks {block_stride} bytes apart; this cache layout is not supported"
        )
    start = cache.storage_offset() * cache.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    end = start + (num_blocks - 1) * block_stride + page_bytes
    if end > whole.numel():
        raise ValueError(
            f"kvsieve: layer {name}: {num_blocks} pages of {page_bytes} bytes, {block_stride} bytes apart, "
            f"need {end} bytes, but its allocation has {whole.numel()}; this cache layout is not supported"
        )
    return whole.as_strided((num_blocks, page_bytes), (block_stride, 1), start)


def _backend_of(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> str:
    """Names of the attention backends: they decide how bytes lie inside a page."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for name in kv_caches:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None) or getattr(layer, "backend", None)
        if backend is not None and hasattr(backend, "get_name"):
            isa = getattr(layer, "isa", None)  # the CPU backend packs K by instruction set
            names.add(f"{backend.get_name()}:{isa}" if isa else backend.get_name())
    return "+".join(sorted(names)) or "unknown"
