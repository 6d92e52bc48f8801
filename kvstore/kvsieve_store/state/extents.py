"""ExtentLedger: which extents are free, and how a pool gets room when slots run out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

import numpy as np

from kvsieve_store.state.pool import Pool


class ExtentLedger:
    """The arena's extents.

    pools: gives the pools of the moment, those that extents may be taken from.
    An extent remembers the highest generation that its slots had, under whatever pool, and hands it on: a
    generation in the arena never comes back.
    """

    def __init__(self, extents: int, pools: Callable[[], Iterable[Pool]]) -> None:
        self.extents = extents
        self._pools = pools
        self._free = list(range(extents))  # a heap: the lowest number goes first
        self._floor = np.zeros(extents, np.uint32)

    @property
    def free(self) -> int:
        """Extents that no pool owns."""
        return len(self._free)

    def can_grow(self, pool: Pool) -> bool:
        """Whether the pool could take a free extent."""
        return bool(self._free) and len(pool.extents) < pool.quota

    def make_room(self, pool: Pool, count: int) -> None:
        """Sees to `count` free slots in the pool, as far as that goes.

        First free extents, then the pool's own cold blocks, then extents of other pools.
        """
        while pool.free < count and self.can_grow(pool):
            self._add(pool)
        if pool.free < count:
            pool.evict(count - pool.free)
        while pool.free < count and len(pool.extents) < pool.quota and self._take_from_another(pool):
            self._add(pool)

    def release(self, pool: Pool, extent: int) -> None:
        """Takes an extent without writing or leased slots from its pool; its blocks are dropped."""
        self._floor[extent] = pool.remove_extent(extent)
        heapq.heappush(self._free, extent)

    def release_all(self, pool: Pool) -> None:
        """Takes all extents from a pool that is idle."""
        extents, generations = pool.disband()
        self._floor[extents] = generations
        self._free = sorted(self._free + extents.tolist())

    def _add(self, pool: Pool) -> None:
        extent = heapq.heappop(self._free)
        pool.add_extent(extent, int(self._floor[extent]))

    def _take_from_another(self, pool: Pool) -> bool:
        for victim in self._victims(pool):
            extent = victim.protection.emptiest_removable(victim.extents)
            if extent is not None:
                sealed = victim.sealed
                self.release(victim, extent)
                victim.counters.evicted_blocks += sealed - victim.sealed
                return True
        return False

    def _victims(self, pool: Pool) -> list[Pool]:
        """Pools to take an extent from: unused ones, longest first, then those above their fair share."""
        others = [other for other in self._pools() if other is not pool]
        unused = sorted((other for other in others if not other.attached), key=lambda other: other.last_used)
        used = [other for other in others if other.attached]
        fair = self.extents / (len(used) + 1)  # also for those that have none yet
        above = sorted(
            (other for other in used if len(other.extents) > fair), key=lambda other: -len(other.extents)
        )
        return unused + above
