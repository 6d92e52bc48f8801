"""The contract of a copy engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvsieve_connector.metadata import LoadOrder, SaveOrder
    from kvsieve_store.client import ArenaMap, ArenaMemory


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of this rank: where its pages are, and where they go in a slot.

    view: uint8 [num_blocks, page_bytes] over the paged cache, rows contiguous.
    offset: bytes from the slot's base to this layer's first page.
    group: KV group whose block ids name the pages. pages: pages per block of the store.
    writes: whether this rank saves the layer; of what TP replicates, only rank 0 does.
    """

    name: str
    view: torch.Tensor
    offset: int
    group: int
    pages: int
    writes: bool

    @property
    def page_bytes(self) -> int:
        return self.view.shape[1]

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.pages


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What has landed in the arena: jobs of the orders, bytes, and the time of the copies in seconds."""

    jobs: list[int]
    copied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load order that has ended. copied: bytes; seconds: time of the copy."""

    req_id: str
    ok: bool
    copied: int
    seconds: float
    blocks: int


class CopyEngine(ABC):
    """Owned by one worker. Layers are given once, the arena whenever it changes.

    Saves read the paged cache in stream order: a page is copied before the next forward can write to it.
    """

    def __init__(self, layers: list[LayerPages], shard: int) -> None:
        self.layers = layers
        self.written = [layer for layer in layers if layer.writes]
        self.shard = shard

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether saves and loads can be started: an arena is there and the device can reach it."""

    @abstractmethod
    def use(self, arena: ArenaMap | None) -> None:
        """Works on this arena from now on; None: on none, loads fail. drain() comes first.

        An arena's memory stays within the device's reach until let_go().
        """

    @abstractmethod
    def let_go(self, memory: ArenaMemory) -> None:
        """Takes memory out of the device's reach, which may take long; nothing reads or writes it any more.
        May be called by any thread."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until no copy touches the arena any more. Loads keep their results; saves are forgotten."""

    @abstractmethod
    def save_layer(self, index: int, orders: list[SaveOrder]) -> None:
        """Copies layer `written[index]` of each block, if this device copies layer by layer; layers come in
        order. Else it is left to finish_saves."""

    @abstractmethod
    def finish_saves(self, orders: list[SaveOrder], done_layers: int) -> None:
        """Copies, or starts to copy, what save_layer has left: layers from `done_layers` on."""

    @abstractmethod
    def saved(self) -> SaveResult:
        """Orders whose bytes are now all in the arena, each once."""

    @abstractmethod
    def start_load(self, order: LoadOrder) -> None:
        """Starts to copy a request's blocks into the paged cache."""

    @abstractmethod
    def loaded(self) -> list[LoadResult]:
        """Loads that have ended, each once."""

    @abstractmethod
    def guard_blocks(self) -> None:
        """What is launched on the device from now on must not overtake saves that read its blocks."""

    @abstractmethod
    def close(self) -> None:
        """Waits for copies under way and frees what the engine holds."""
