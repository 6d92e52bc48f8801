"""The KV cache spec of a host-backed layer in sparse mode.

It looks like a sliding window to vLLM: then the planner splits a DSA model's main layers into KV groups that
fit the indexer's page, and frees a request's old blocks. What is really freed, and when, is
HostBackedManager's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvsieve_connector.geometry import layer_specs
from kvsieve_connector.sparse.plan import HostPlan, SparsePlan

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

RETAINED_TOKENS = 1 << 30
"""The workers' block tables keep every entry: an old block stays readable until it is reused."""


class HostBacked:
    """What both specs have in common. window_blocks, hot_blocks: as in HostPlan. sliding_window: the window
    in tokens."""

    block_size: int
    page_size_bytes: int
    extra_retained_tokens: int
    window_blocks: int
    hot_blocks: int

    @property
    def prefix_cacheable(self) -> bool:
        """A prefix hit is read from the arena. Of a DSA model, the indexer's group decides on hits."""
        return False

    @property
    def num_retained_tokens(self) -> int:
        return RETAINED_TOKENS + int(self.extra_retained_tokens)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks of a group that a request holds, its hot buffer included.

        Before it is host-backed: hot_blocks durable blocks below the window at most, the window, and what is
        in flight, which may begin and end inside a block: hot + window + in flight + 1. From then on the
        durable ones are the pool's again, and the hot buffer takes as many: the same sum. Blocks that are
        not durable yet come on top for the steps that their copies take; an allocation that fails for them
        waits (SparseScheduler.has_pending_block_frees).
        """
        tokens = max_in_flight_tokens + self.extra_retained_tokens
        recent = self.window_blocks + -(-tokens // self.block_size) + 1
        return int(min(recent, -(-max_model_len // self.block_size)) + self.hot_blocks)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Raises AssertionError when they differ, as vLLM's planner wants it."""
        assert all(spec == specs[0] for spec in specs), (
            "host-backed layers of one KV group must have one spec"
        )
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(_shape(spec) == _shape(self) for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class HostBackedMLASpec(HostBacked, SlidingWindowMLASpec):
    """The latent rows of a DSA model's main layer."""

    window_blocks: int
    hot_blocks: int


@dataclass(frozen=True, kw_only=True)
class HostBackedSpec(HostBacked, SlidingWindowSpec):
    """K and V of a dense model's layer."""

    window_blocks: int
    hot_blocks: int


Spec = TypeVar("Spec", HostBackedMLASpec, HostBackedSpec)


def to_host_backed(spec: MLAAttentionSpec, plan: SparsePlan) -> HostBackedMLASpec:
    """The same cache, host-backed. Raises ValueError when the backend's rows are not those of the plan."""
    if (spec.block_size, spec.page_size_bytes) != (plan.block_tokens, plan.block_tokens * plan.row_bytes):
        raise ValueError(
            f"kvsieve: sparse mode: the attention backend keeps blocks of {spec.block_size} tokens in "
            f"{spec.page_size_bytes} bytes ({getattr(spec, 'cache_dtype_str', None)}), but "
            f"{plan.block_tokens} rows of {plan.row_bytes} bytes are supported; use --kv-cache-dtype auto or "
            "fp8_ds_mla, or another backend"
        )
    return as_host_backed(HostBackedMLASpec, spec, plan)


def as_host_backed(cls: type[Spec], spec: AttentionSpec, plan: HostPlan) -> Spec:
    """The spec of class `cls` for the same cache."""
    known = {field.name for field in fields(cls) if field.init}
    same: dict[str, Any] = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init and f.name in known}
    same |= {"window_blocks": plan.window_blocks, "hot_blocks": plan.hot_blocks}
    return cls(**same | {"sliding_window": plan.window_blocks * plan.block_tokens})


def main_groups(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Indices of the KV groups of host-backed layers, in order."""
    return tuple(
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if all(isinstance(spec, HostBacked) for _, spec in layer_specs(group))
    )


def _shape(spec: KVCacheSpec) -> tuple[int, ...] | None:
    if not isinstance(spec, HostBacked):
        return None
    return spec.block_size, spec.window_blocks, spec.hot_blocks, spec.page_size_bytes
