"""vLLM's own planner and KV cache manager, for a DSA model that no CPU can run."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from kvsieve_connector import plugin
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.sparse.manager import HostBackedManager, bind_managers
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.residency import Holding
from kvsieve_connector.sparse.spec import HostBackedSpec, as_host_backed, to_host_backed

try:
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:  # vLLM 0.32
    from vllm.v1.core import kv_cache_utils as planner

BLOCK = 64
ROW_BYTES, INDEXER_ROW_BYTES = 656, 132

plugin.register()
_hash = get_hash_fn_by_name("sha256")
init_none_hash(_hash)
block_hasher = get_request_block_hasher(BLOCK, _hash)


def sparse_plan(hot_blocks: int = 48, window_blocks: int = 2) -> SparsePlan:
    return SparsePlan(
        block_tokens=BLOCK,
        topk=2048,
        query_tokens=1,
        hot_blocks=hot_blocks,
        window_blocks=window_blocks,
        row_bytes=ROW_BYTES,
    )


def dense_plan(window_blocks: int = 2) -> DensePlan:
    return DensePlan(
        block_tokens=BLOCK,
        budget_blocks=8,
        first_blocks=1,
        window_blocks=window_blocks,
        selector="mean-key",
        dense_layers=0,
        max_blocks=32,
        max_num_seqs=64,
    )


def vllm_config(max_model_len: int, in_flight: int) -> Any:
    """What the planner reads of a configuration. in_flight: tokens of the steps that overlap."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            prefix_cache_retention_interval=0,
            num_gpu_blocks_override=None,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=in_flight,
    )


def scene_config(
    hot_blocks: int, chunk: int, overlap: int, seqs: int, max_model_len: int, dense: str = ""
) -> Any:
    """Of a scene's engine (sparse_scene.Scene), whose arguments these are."""
    config = vllm_config(max_model_len, chunk * overlap)
    hf = SimpleNamespace(index_topk=hot_blocks * BLOCK, kv_lora_rank=512, qk_rope_head_dim=64)
    if dense:
        hf = SimpleNamespace(num_hidden_layers=10)
    config.model_config.__dict__.update(model="m", hf_text_config=hf, dtype=torch.bfloat16)
    config.cache_config.__dict__.update(
        block_size=BLOCK, cache_dtype="auto" if dense else "fp8", prefix_caching_hash_algo="sha256"
    )
    config.scheduler_config.__dict__.update(max_num_seqs=seqs, max_num_batched_tokens=chunk)
    config.__dict__.update(
        num_speculative_tokens=0,
        max_concurrent_batches=overlap,
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector="KVSieveConnector"),
        device_config=SimpleNamespace(device_type=dense or "cuda"),
    )
    return config


def plan_cache(config: Any, layers: int, memory: int, plan: SparsePlan | None) -> KVCacheConfig:
    """The scheduler's configuration of `memory` bytes. plan: of sparse mode; None: stock vLLM."""

    def layer(row_bytes: int, **more: Any) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, dtype=torch.uint8, state_content_bytes=row_bytes, **more
        )

    specs: dict[str, Any] = {}
    for i in range(layers):
        main = layer(ROW_BYTES, head_size=576, cache_dtype_str="fp8_ds_mla")
        specs[f"layers.{i}.attn"] = to_host_backed(main, plan) if plan is not None else main
        specs[f"layers.{i}.indexer.k_cache"] = layer(
            INDEXER_ROW_BYTES, head_size=INDEXER_ROW_BYTES, cache_role=SparseCacheRole.INDEXER
        )
    return _planned(config, specs, memory)


def plan_dense_cache(config: Any, layers: int, memory: int, plan: DensePlan) -> KVCacheConfig:
    """The same of a dense model in sparse mode."""
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    backed = as_host_backed(HostBackedSpec, layer, plan)
    return _planned(config, {f"layers.{i}.attn": backed for i in range(layers)}, memory)


def _planned(config: Any, specs: dict[str, Any], memory: int) -> KVCacheConfig:
    groups = planner.get_kv_cache_groups(config, specs)
    whole = planner.get_kv_cache_config_from_groups(config, groups, memory)
    return generate_scheduler_kv_cache_config([whole])


def cache_manager(config: Any, kv_cache_config: KVCacheConfig) -> KVCacheManager:
    return KVCacheManager(
        kv_cache_config,
        max_model_len=config.model_config.max_model_len,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        max_in_flight_tokens=config.max_in_flight_tokens,
        enable_caching=True,
    )


def new_request(name: str, tokens: list[int], max_tokens: int = 16) -> Request:
    return Request(
        name, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, block_hasher=block_hasher
    )


def tokens_of(number: int, count: int) -> list[int]:
    """A prompt that shares nothing with that of another number."""
    return [number * 1000 + i % 997 for i in range(count)]


@dataclass
class Live:
    """A request that holds blocks. ordered: its first blocks whose copies are under way or done."""

    request: Request
    ordered: int = 0
    saved: list[int] = field(default_factory=list)


class Engine:
    """vLLM's scheduler and the connector's, as far as blocks are concerned. Nothing is computed."""

    def __init__(
        self, layers: int, memory: int, plan: Any, max_model_len: int, in_flight: int, seqs: int = 64
    ) -> None:
        self.plan = plan
        self.config = vllm_config(max_model_len, in_flight)
        plan_it = plan_dense_cache if isinstance(plan, DensePlan) else plan_cache
        self.cache = plan_it(self.config, layers, memory, plan)
        self.manager = cache_manager(self.config, self.cache)
        self.ended: list[Holding] = []
        self.residency = bind_managers(self.manager, plan, seqs, self.ended.append)
        self.pool = self.manager.block_pool
        self.main = [
            m for m in self.manager.coordinator.single_type_managers if isinstance(m, HostBackedManager)
        ]
        self.live: dict[str, Live] = {}
        self.free_at_start = self.pool.get_num_free_blocks()

    def admit(self, request: Request, chunk: int, matched: int = 0) -> bool:
        """The request's first step, after a prefix hit of the indexer's group and a match of `matched` blocks
        in the store. False when there is no room."""
        blocks, local, _ = self.manager.get_computed_blocks(request)
        external = max(matched * BLOCK - local, 0)
        computed = local + external
        assert computed <= matched * BLOCK, "a local hit that the store does not have"
        if computed and not self.residency.has_room(computed // BLOCK):
            return False
        tokens = min(chunk, request.num_tokens - computed)
        if not self._allocate(
            request,
            tokens,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            full_sequence_must_fit=True,
        ):
            return False
        request.num_computed_tokens = computed + tokens
        self.live[request.request_id] = Live(request, computed // BLOCK)
        return True

    def step(self, name: str, chunk: int) -> bool:
        """One more step of a running request: of its prompt, or one token. False when there is no room."""
        request = self.live[name].request
        if request.num_computed_tokens >= request.num_tokens:
            request.append_output_token_ids(7)
        tokens = min(chunk, request.num_tokens - request.num_computed_tokens)
        if not self._allocate(request, tokens):
            return False
        request.num_computed_tokens += tokens
        return True

    def _allocate(self, request: Request, tokens: int, **more: Any) -> bool:
        """Holds vLLM to what it was told that it would take."""
        coordinator, told = self.manager.coordinator, []
        ask = coordinator.get_num_blocks_to_allocate

        def spy(*args: Any, **kwargs: Any) -> int:
            told.append((ask(*args, **kwargs), self.pool.get_num_free_blocks()))
            return told[-1][0]

        coordinator.get_num_blocks_to_allocate = spy
        try:
            given = self.manager.allocate_slots(request, tokens, **more)
        finally:
            del coordinator.get_num_blocks_to_allocate
        if given is not None:
            need, free = told[-1]
            assert self.pool.get_num_free_blocks() == free - need
        return given is not None

    def save(self, name: str) -> None:
        """All full blocks of the request are copied to the arena from now on."""
        live = self.live[name]
        full = live.request.num_computed_tokens // BLOCK
        live.saved.extend(range(live.ordered, full))
        live.ordered = full

    def ack(self, name: str) -> None:
        """The copies ordered so far have landed."""
        live = self.live[name]
        live.saved.clear()
        self.residency.set_durable(name, live.ordered)

    def free(self, name: str) -> None:
        self.manager.free(self.live.pop(name).request)

    def pinned(self, name: str) -> list[int]:
        """How many blocks each main group holds for the request."""
        return [
            len([b for b in m.req_to_blocks[name] if not b.is_null]) + len(m._hot.get(name, ()))
            for m in self.main
        ]
