"""Which blocks of the main plane are on the GPU: one ledger for all main groups of an engine.

A block of a request is pinned, or released (in the pool's free queue and still readable), or lost (reused:
read from the arena). The managers of the main groups are asked one after another; what they do is decided
here, once, so that they do it in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvsieve_connector.sparse.spec import HostBacked


@dataclass(eq=False, slots=True)
class Holding:
    """One request from its first blocks to the release of all of them; a preempted request gets a new one.

    durable: its first blocks that are in the arena, as a count. wanted: its blocks below the window, as a
    count. limit: blocks below it are released, or never were on this GPU. host_backed: it has, or is about to
    get, hot blocks. hot: their ids by KV group. lost: indices of blocks that were reused.
    """

    request_id: str
    durable: int = 0
    wanted: int = 0
    limit: int = 0
    host_backed: bool = False
    ended: bool = False
    hot: dict[int, tuple[int, ...]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)


class Residency:
    """See the module's docstring."""

    def __init__(
        self,
        spec: HostBacked,
        groups: tuple[int, ...],
        max_host_backed: int,
        max_pages: int,
        on_end: Callable[[Holding], None],
    ) -> None:
        """spec: of all main groups. groups: their indices. max_host_backed: requests; max_pages: blocks that
        all requests together may have released: sizes of the workers' tables. on_end: called when a request
        has given its blocks back, for whatever reason."""
        self._spec, self._groups = spec, groups
        self._max_host_backed, self._max_pages = max_host_backed, max_pages
        self._on_end = on_end
        self._holdings: dict[str, Holding] = {}
        self._owners: dict[int, tuple[Holding, int]] = {}
        """Released block -> whose it is, and its index there. Those of an ended request go with reuse."""
        self._backed: list[Holding] = []
        self._lost: list[tuple[Holding, int]] = []
        self.host_backed = 0
        """Requests that are host-backed."""
        self.pages = 0
        """Blocks released, of all requests."""

    # For the managers

    def get(self, request_id: str) -> Holding | None:
        return self._holdings.get(request_id)

    def admit(self, request_id: str, computed_blocks: int) -> Holding:
        """The request gets its first blocks. computed_blocks: of its prefix, whose main plane is only in the
        arena. Called by each manager in turn; the first call counts."""
        holding = self._holdings.get(request_id)
        if holding is None:
            holding = self._holdings[request_id] = Holding(request_id, computed_blocks)
            if computed_blocks:
                self._back(holding, computed_blocks)
        return holding

    def release_limit(self, holding: Holding, settled_tokens: int) -> int:
        """Blocks below this are to be released. settled_tokens: computed, and no step can undo that."""
        holding.wanted = max(settled_tokens // self._spec.block_size - self._spec.window_blocks, 0)
        room = self._max_pages - self.pages
        target = min(holding.wanted, holding.durable, holding.limit + room)
        if holding.host_backed:
            self.pages += max(target - holding.limit, 0)
            holding.limit = max(target, holding.limit)
        elif target > self._spec.hot_blocks and self.host_backed < self._max_host_backed:
            # More is given back than the hot buffer takes.
            self._back(holding, target)
        return holding.limit

    def release(self, holding: Holding, first: int, blocks: list[KVCacheBlock], pool: BlockPool) -> None:
        """Unpins one group's blocks of the request, from index `first` on."""
        self._owners.update((block.block_id, (holding, first + i)) for i, block in enumerate(blocks))
        pool.unpin_blocks(blocks, self._reused)

    def claimed(self, holding: Holding, group: int, blocks: Iterable[KVCacheBlock]) -> None:
        """One group's hot blocks are there."""
        holding.hot[group] = tuple(block.block_id for block in blocks)
        if len(holding.hot) == len(self._groups):
            self._backed.append(holding)

    def end(self, request_id: str) -> None:
        """The request gives back its blocks. Called by each manager in turn; the first call counts."""
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return
        holding.ended = True
        self.host_backed -= holding.host_backed
        self.pages -= holding.limit
        self._on_end(holding)

    # For the scheduler half

    def has_room(self, blocks: int) -> bool:
        """Whether a request with so many blocks in the arena can begin."""
        return self.host_backed < self._max_host_backed and self.pages + blocks <= self._max_pages

    def set_durable(self, request_id: str, blocks: int) -> None:
        """The request's first `blocks` blocks are in the arena and stay there until on_end."""
        holding = self._holdings[request_id]
        holding.durable = max(holding.durable, blocks)

    def waits_for_saves(self, request_id: str) -> bool:
        """Whether blocks of the request will be released once more of them are durable."""
        holding = self._holdings.get(request_id)
        if holding is None or holding.durable >= holding.wanted:
            return False
        return holding.host_backed or holding.wanted > self._spec.hot_blocks

    def take_backed(self) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Requests that have become host-backed, with their hot blocks' ids per main group; each once."""
        backed, self._backed = self._backed, []
        return [
            (holding.request_id, tuple(holding.hot[group] for group in self._groups))
            for holding in backed
            if not holding.ended
        ]

    def take_lost(self) -> dict[str, list[int]]:
        """Blocks that have been lost, by request; each once."""
        lost, self._lost = self._lost, []
        found: dict[str, list[int]] = {}
        for holding, index in lost:
            if not holding.ended:
                found.setdefault(holding.request_id, []).append(index)
        return found

    def _back(self, holding: Holding, limit: int) -> None:
        holding.host_backed, holding.limit = True, limit
        self.host_backed += 1
        self.pages += limit

    def _reused(self, block: KVCacheBlock) -> None:
        """The pool gives a released block to someone else. Then the request reads that block of its context
        from the arena, in all groups."""
        holding, index = self._owners.pop(block.block_id, (None, 0))
        if holding is not None and not holding.ended and index not in holding.lost:
            holding.lost.add(index)
            self._lost.append((holding, index))
