"""vLLM's manager of one main group in sparse mode.

A request holds its newest blocks and, once that pays, its hot blocks. Older blocks are released as soon as
they are in the arena. Blocks of a prefix hit are never allocated: they are in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from kvsieve_connector.sparse.plan import HostPlan
from kvsieve_connector.sparse.residency import Holding, Residency
from kvsieve_connector.sparse.spec import HostBacked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HostBackedManager(SlidingWindowManager):
    """`residency` is set before the first request comes: bind_managers()."""

    kv_cache_spec: HostBacked
    residency: Residency

    def __init__(self, kv_cache_spec: HostBacked, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._hot_blocks = kv_cache_spec.hot_blocks
        self._hot: dict[str, list[KVCacheBlock]] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """What allocate_new_blocks takes from the pool next, hot blocks included."""
        assert not new_computed_blocks
        holding = self.residency.get(request_id)
        table = len(self.req_to_blocks.get(request_id, ()))
        computed = total_computed_tokens // self.block_size
        need = max(-(-num_tokens // self.block_size) - max(table, computed), 0)
        if request_id not in self._hot and (holding.host_backed if holding is not None else computed):
            need += self._hot_blocks
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            held = table - (holding.limit if holding is not None else 0) + len(self._hot.get(request_id, ()))
            need = min(need, max(self.max_admission_blocks_per_request - held, 0))
        return need

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        assert not new_computed_blocks
        assert not self.req_to_blocks.get(request_id)
        computed = (num_local_computed_tokens + num_external_computed_tokens) // self.block_size
        self.residency.admit(request_id, computed)
        self.req_to_blocks[request_id].extend([self._null_block] * computed)
        self.num_cached_block[request_id] = 0

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Nothing: they are in the arena (add_local_computed_blocks has noted them)."""

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """New blocks of the request's block table; hot blocks are not part of it."""
        self._claim_hot(self.residency.admit(request_id, 0))
        return list(super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Releases what is below the window and durable. A request that is not host-backed keeps all of it
        until it is more than a hot buffer, which it then gets."""
        holding = self.residency.get(request_id)
        if holding is None:
            return
        limit = self.residency.release_limit(holding, processed_computed_tokens - self.extra_retained_tokens)
        table = self.req_to_blocks.get(request_id, [])
        first = limit = min(limit, len(table))
        while first and not table[first - 1].is_null:
            first -= 1
        if first < limit:
            self.residency.release(holding, first, table[first:limit], self.block_pool)
            table[first:limit] = [self._null_block] * (limit - first)
        self._claim_hot(holding)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        hot = self._hot.pop(request_id, [])
        pinned = [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]
        self.residency.end(request_id)
        return hot + pinned

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """None: the indexer's group decides on hits."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def _claim_hot(self, holding: Holding) -> None:
        if holding.host_backed and holding.request_id not in self._hot:
            hot = self.block_pool.get_new_blocks(self._hot_blocks)
            self._hot[holding.request_id] = hot
            self.residency.claimed(holding, self.kv_cache_group_id, hot)


def bind_managers(
    kv_cache_manager: KVCacheManager,
    plan: HostPlan,
    max_num_seqs: int,
    on_end: Callable[[Holding], None],
) -> Residency:
    """Gives the main groups' managers one ledger, and returns it. on_end: see Residency.

    Raises ValueError when vLLM has not planned the cache as sparse mode needs it.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    main = [manager for manager in managers if isinstance(manager, HostBackedManager)]
    others = [manager for manager in managers if not isinstance(manager, HostBackedManager)]
    found = ", ".join(f"{type(m).__name__} of {type(m.kv_cache_spec).__name__}" for m in managers)
    full = [manager for manager in others if isinstance(manager, FullAttentionManager)]
    if not main or len(others) != plan.indexers or len(full) != plan.indexers:
        raise ValueError(
            f"kvsieve: sparse mode needs KV groups of host-backed layers and {plan.indexers} of full "
            f"attention, for the indexer; vLLM has made these: {found}. Is it an attention backend that "
            "kvsieve does not know?"
        )
    if any(manager.kv_cache_spec != main[0].kv_cache_spec for manager in main):
        raise ValueError("kvsieve: sparse mode needs one spec for all main layers; vLLM has several")
    spec = main[0].kv_cache_spec
    given = (spec.block_size, spec.window_blocks, spec.hot_blocks, *(m.block_size for m in others))
    planned = (plan.block_tokens, plan.window_blocks, plan.hot_blocks, *(plan.block_tokens for _ in others))
    if given != planned:
        raise ValueError(
            "kvsieve: sparse mode: block, window and hot blocks of main layers, and block of the indexer, "
            f"are {given}, not as planned: {plan}"
        )
    pool = kv_cache_manager.block_pool
    residency = Residency(
        spec,
        groups=tuple(manager.kv_cache_group_id for manager in main),
        max_host_backed=plan.table_slots(pool.num_gpu_blocks, len(main), max_num_seqs),
        max_pages=plan.pages(pool.num_gpu_blocks) - 1,
        on_end=on_end,
    )
    for manager in main:
        manager.residency = residency
    return residency
