"""What a worker keeps of each host-backed request: which blocks are in the arena, and their summaries.

All decisions are the scheduler's; they come once a step, before the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvsieve_connector.dense.pages import I64Array


class HostContext:
    """One request. It grows with its blocks, by doubling.

    arena_blocks: how many blocks are read from the arena. summarised: its first blocks that have summaries,
    as a count.
    """

    def __init__(self, layers: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """width: floats of a summary, per block and KV head. dtype: of what is kept of them."""
        self.arena_blocks = 0
        self.summarised = 0
        self._slots = np.zeros(0, np.int64)
        self._summaries = torch.empty((layers, 0, heads, width), dtype=dtype)

    def add(self, blocks: Iterable[tuple[int, int]]) -> None:
        """blocks: (index in the request, address of its slot), to be read from there from now on."""
        for index, address in blocks:
            if index >= self._slots.size:
                more = np.zeros(max(2 * self._slots.size, index + 1, 32) - self._slots.size, np.int64)
                self._slots = np.concatenate([self._slots, more])
            if not address or self._slots[index]:
                raise RuntimeError(f"kvsieve: block {index} of a request is in the arena already, or nowhere")
            self._slots[index] = address
            self.arena_blocks += 1

    def slots(self, count: int) -> I64Array:
        """int64 [count]: addresses of the slots of the first blocks, 0 for one in the pool."""
        found = self._slots[:count]
        return (
            found if found.size == count else np.concatenate([found, np.zeros(count - found.size, np.int64)])
        )

    def summaries(self, layer: int, count: int) -> Tensor:
        """Of the first `count` blocks: [count, heads, width]."""
        assert count <= self.summarised
        return self._summaries[layer, :count]

    def summarise(self, layer: int, first: int, summaries: Tensor) -> None:
        """Keeps those of one layer's blocks from `first` on."""
        end = first + len(summaries)
        layers, room, heads, width = self._summaries.shape
        if end > room:
            grown = self._summaries.new_empty((layers, max(2 * room, end), heads, width))
            grown[:, :room] = self._summaries
            self._summaries = grown
        self._summaries[layer, first:end] = summaries


class HostContexts:
    """The host-backed requests of a worker, by their ids."""

    def __init__(self, layers: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """As HostContext."""
        self._shape = (layers, heads, width, dtype)
        self._contexts: dict[str, HostContext] = {}

    def get(self, req_id: str) -> HostContext | None:
        return self._contexts.get(req_id)

    def begin(self, req_id: str) -> None:
        """Raises RuntimeError for one that is there already: the scheduler has miscounted."""
        if req_id in self._contexts:
            raise RuntimeError(f"kvsieve: request {req_id} is host-backed already")
        self._contexts[req_id] = HostContext(*self._shape)

    def add(self, req_id: str, blocks: Iterable[tuple[int, int]]) -> None:
        """As HostContext.add()."""
        self._contexts[req_id].add(blocks)

    def end(self, req_id: str) -> None:
        """One that is not there is skipped."""
        self._contexts.pop(req_id, None)
