"""Prefill over a context in the arena: pages come ahead of compute, into two buffers by turns.

While attention runs over one context, the pages of the next (the next group of requests, or the first group
of the next layer) are fetched on a stream of their own. What a layer needs from the GPU, the chunk's own rows
among it, is written only when the layer runs, so only the arena's pages are staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvsieve_connector.device import beside, upload

if TYPE_CHECKING:
    from collections.abc import Callable

FETCH_BLOCKS = 16
"""Multiprocessors that a fetch takes from compute; enough to keep the link busy."""


class Layer(Protocol):
    """cache: uint8 [*, n, m], n * m bytes a page. layer_offset: bytes from a slot's base to its page."""

    @property
    def cache(self) -> torch.Tensor: ...
    @property
    def layer_offset(self) -> int: ...


class Sizes(Protocol):
    @property
    def blocks(self) -> int: ...


class Tables(Protocol):
    """sizes.blocks: most blocks of a request."""

    @property
    def sizes(self) -> Sizes: ...

    def host_pages(self, req_id: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Indices of a request's blocks that are in the arena, and their slots' addresses."""


class Kernels(Protocol):
    @property
    def fetch_pages(self) -> Callable[..., None]: ...


@dataclass(frozen=True, slots=True)
class StagedContexts:
    """The arena's pages of a group of contexts.

    places: int32 [n, B], per request and block its place in a staging buffer, -1 for a block on the GPU.
    addresses: int64 [pages], host addresses of the slots, in the order of places.
    """

    places: torch.Tensor
    addresses: torch.Tensor


class Staging:
    """Two buffers of pages, used by turns. Items are (layer, contexts), in the order of attention's runs."""

    def __init__(self, caches: Sequence[Layer], tables: Tables, kernels: Kernels, capacity: int) -> None:
        """caches: the layers, in the order of their runs. capacity: most pages of a group of contexts."""
        self._caches, self._tables, self._kernels = caches, tables, kernels
        self._device = caches[0].cache.device
        page_bytes = caches[0].cache.shape[1] * caches[0].cache.shape[2]
        self._buffers = [
            torch.empty((capacity, page_bytes), dtype=torch.uint8, device=self._device) for _ in range(2)
        ]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._turn = 0
        self._fetched: tuple[int, StagedContexts] | None = None

    def reset(self) -> None:
        """Another batch: what was fetched ahead is of the last one."""
        self._fetched = None

    def contexts(self, req_ids: Sequence[str]) -> StagedContexts | None:
        """Where the pages of these requests' contexts go; None when all are on the GPU."""
        pages = [self._tables.host_pages(req_id) for req_id in req_ids]
        count = sum(len(indices) for indices, _ in pages)
        if not count:
            return None
        places = np.full((len(req_ids), self._tables.sizes.blocks), -1, np.int32)
        first = 0
        for row, (indices, _) in enumerate(pages):
            places[row, indices] = np.arange(first, first + len(indices))
            first += len(indices)
        addresses = np.concatenate([addresses for _, addresses in pages])
        return StagedContexts(
            upload(places, torch.int32, self._device), upload(addresses, torch.int64, self._device)
        )

    def take(self, layer: int, contexts: StagedContexts) -> torch.Tensor:
        """The pages of an item, uint8 [pages, page bytes], on the current stream; fetched now if they were
        not fetched ahead."""
        ahead = self._fetched is not None and self._fetched[0] == layer and self._fetched[1] is contexts
        if not ahead:
            self._fetch(layer, contexts)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._fetched = None
        return self._buffers[self._turn]

    def ahead(self, layer: int, contexts: StagedContexts | None) -> None:
        """Starts to fetch an item; what runs on the current stream up to now comes first."""
        if contexts is not None and layer < len(self._caches):
            self._fetch(layer, contexts)
            self._fetched = (layer, contexts)

    def _fetch(self, layer: int, contexts: StagedContexts) -> None:
        self._turn ^= 1
        if self._stream is not None:
            contexts.addresses.record_stream(self._stream)
        with beside(self._stream):
            addresses = contexts.addresses + self._caches[layer].layer_offset
            self._kernels.fetch_pages(self._buffers[self._turn], addresses, FETCH_BLOCKS)
