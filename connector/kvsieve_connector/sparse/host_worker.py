"""What both worker halves of sparse mode share: arenas stay mapped while requests read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve_connector.worker import WorkerHalf
from kvsieve_store.client import ArenaMap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HostWorkerHalf(WorkerHalf):
    """See the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._kept: dict[int, ArenaMap] = {}
        """Arenas of sessions that are over, by epoch: locked while live requests read their slots."""

    def close(self) -> None:
        if self._engine is not None:
            self._unmap()
        for epoch in list(self._kept):
            self._forget(epoch)
        super().close()

    def _arena_of(self, epoch: int) -> ArenaMap:
        if epoch in self._kept:
            return self._kept[epoch]
        assert self._arena is not None
        assert epoch == self._epoch, "host blocks of an arena that is not mapped"
        return self._arena

    def _session_over(self, arena: ArenaMap) -> None:
        """Its arena stays mapped, pinned and locked while requests read it. A lock is a session's own, also
        where the next session has the same memory: without it, the store would give the slots away."""
        self._kept[self._epoch] = arena

    def _forget(self, epoch: int) -> None:
        arena = self._kept.pop(epoch, None)
        if arena is not None:
            self._arenas.leave(arena)
