"""Runs a prefetch policy on the device: on a stream of its own, forked from and joined to the model's.

Forks and joins are in stream order only, so that they are captured into CUDA graphs like everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvsieve_connector.device import beside
from kvsieve_connector.sparse.prefetch import Policy

if TYPE_CHECKING:
    from kvsieve_connector.kernels.swap_in import LayerCache
    from kvsieve_connector.sparse.kernel_set import KernelSet
    from kvsieve_connector.sparse.tables import HostTables


class Prefetcher:
    """What a policy says to fetch in every step, in between the swap-ins of the layers.

    A list is fetched as soon as the layer that has it is done, one layer ahead of its use at the earliest: a
    layer's hot buffer is never worked on by two kernels at a time, because its swap-in joins first.
    """

    def __init__(
        self, policy: Policy, caches: Sequence[LayerCache], tables: HostTables, kernels: KernelSet, topk: int
    ) -> None:
        """caches: the layers, in the order of their runs. topk: entries of a list."""
        self._caches, self._tables, self._kernels = caches, tables, kernels
        self._device = caches[0].cache.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._after: dict[int, list[int]] = {}
        """Layers to prefetch for once a layer is done, with that layer's own list."""
        self._margins: dict[int, list[tuple[int, int]]] = {}
        """Once a layer is done: the layers to prefetch for with their own last list, and the margins."""
        for layer, prefetches in enumerate(policy.steps):
            for prefetch in prefetches:
                if prefetch.source == "previous-step":
                    self._margins.setdefault(max(layer - 1, 0), []).append((layer, prefetch.margin))
                else:
                    self._after.setdefault(prefetch.layer, []).append(layer)
        slots = tables.sizes.slots + 1  # the last one is of requests that have none
        with_last = [layer for margins in self._margins.values() for layer, _ in margins]
        self._last = {
            layer: torch.full((slots, topk), -1, dtype=torch.int32, device=self._device)
            for layer in with_last
        }
        self._running = False

    def before(self) -> None:
        """A swap-in is next on the current stream: what was launched beside it comes first."""
        if self._running and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._running = False

    def after(self, layer: int, topk: torch.Tensor, requests: int) -> None:
        """The layer's swap-in is queued. topk: its list, int32 [T, k], of `requests` batch rows."""
        lists = topk.view(requests, -1)
        if layer in self._last:
            self._remember(layer, lists)
        launches = layer in self._after or layer in self._margins
        if not launches or layer == len(self._caches) - 1:  # no swap-in follows that would join
            return
        self._running = True
        with beside(self._stream):
            for target in self._after.get(layer, ()):
                self._kernels.prefetch(self._caches[target], self._tables.requests, lists)
            for target, margin in self._margins.get(layer, ()):
                self._fetch_margin(target, margin, requests)

    def _remember(self, layer: int, lists: torch.Tensor) -> None:
        """Keeps the newest query's list of each request."""
        last = self._last[layer]
        last.index_copy_(0, self._slots(lists.shape[0]), lists[:, -last.shape[1] :])

    def _fetch_margin(self, layer: int, margin: int, requests: int) -> None:
        sizes = self._tables.sizes
        last = self._last[layer].index_select(0, self._slots(requests))
        for step in range(-margin, margin + 1):
            near = last + step
            inside = (last >= 0) & (near >= 0) & (near < sizes.blocks * sizes.block_tokens)
            if step:
                lists = torch.where(inside, near, -1)
                self._kernels.prefetch(self._caches[layer], self._tables.requests, lists)

    def _slots(self, requests: int) -> torch.Tensor:
        """Table slot of each batch row, the last one for padding, too."""
        slots = self._tables.requests.row_slot[:requests].long()
        return torch.where(slots < 0, self._tables.sizes.slots, slots)
