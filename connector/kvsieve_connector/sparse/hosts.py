"""Where a request's blocks are in the arena, and what the store keeps for it there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvsieve_store.client import SlotRef

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvsieve_connector.blocks import Blocks


class Place(NamedTuple):
    """A slot that holds a block, in the epoch of its attachment."""

    epoch: int
    slot: int


@dataclass(eq=False, slots=True)
class Host:
    """One request from its first blocks on the GPU to the release of all of them; a preempted request gets a
    new one.

    expected: blocks that it may come to have. known: its first blocks that were matched or ordered to be
    saved, as a count; missing: those of them whose save failed. places: blocks that can be read, by index;
    epochs: theirs. durable: the first of these without a gap, as a count. leases, kept: what to give back
    to the store afterwards, as (epoch, lease id) and (epoch, slot). told: the workers know of it. hints: some
    of its blocks are read from the arena, so that it leaves a hint. ended: its blocks are not its own any
    more. filled: dense models on GPUs: the pool's blocks of those that were computed here, from index
    `begins_with` on; summarised: its first blocks whose summaries are ordered or come from the arena.
    """

    request: Request
    expected: int
    known: int = 0
    durable: int = 0
    told: bool = False
    hints: bool = False
    ended: bool = False
    begins_with: int = 0
    summarised: int = 0
    filled: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    places: dict[int, Place] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    leases: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, SlotRef]] = field(default_factory=list)

    @property
    def owed(self) -> int:
        """Slots that the request may still write to, one for its hint among them."""
        return max(self.expected - self.known, 0) + len(self.missing) + self.hints

    @property
    def is_copying(self) -> bool:
        """Whether the next block to become durable is on its way."""
        return self.durable < self.known and self.durable not in self.missing

    def to_save(self, full: int) -> list[int]:
        """Blocks of the first `full` that are to be saved, in order."""
        return [*sorted(self.missing), *range(self.known, full)]

    def ordered(self, index: int) -> None:
        """A save of the block, of to_save() in order, is under way."""
        if index in self.missing:
            self.missing.discard(index)
        else:
            self.known = index + 1

    def put(self, index: int, place: Place) -> None:
        """The block can be read there."""
        self.places[index] = place
        self.epochs.add(place.epoch)
        while self.durable in self.places:
            self.durable += 1

    def found(self, slots: Iterable[SlotRef], epoch: int, lease_ids: Iterable[int]) -> None:
        """The request begins with these blocks, leased in the store."""
        for index, ref in enumerate(slots):
            self.put(index, Place(epoch, ref.slot))
        self.known = self.begins_with = self.summarised = self.durable
        self.leased(epoch, lease_ids)

    def lease(self, epoch: int) -> int:
        """The newest lease of the epoch, to which others are added; 0: none."""
        return self.leases[-1][1] if self.leases and self.leases[-1][0] == epoch else 0

    def leased(self, epoch: int, lease_ids: Iterable[int]) -> None:
        """Blocks of the request are leased so."""
        self.leases.extend(new for lease in lease_ids if (new := (epoch, lease)) not in self.leases)

    def session_over(self) -> None:
        """Saves that were under way are lost. What is in the arena stays readable."""
        self.missing.update(index for index in range(self.durable, self.known) if index not in self.places)


class Hosts(dict[str, Host]):
    """Those of an engine, by the ids of their requests."""

    @property
    def owed(self) -> int:
        """Slots that they may still write to."""
        return sum(host.owed for host in self.values())

    @property
    def epochs(self) -> set[int]:
        """Of the arenas that they read."""
        return {epoch for host in self.values() for epoch in host.epochs}

    def will_save(self, index: int, key: bytes, blocks: Blocks) -> bool:
        """Whether one of them has the block of this key, its `index`-th, and a slot for it."""
        return any(
            (host.known <= index < host.expected or index in host.missing)
            and index < blocks.known(host.request)
            and blocks.key(host.request, index) == key
            for host in self.values()
        )

    def session_over(self) -> None:
        """As Host.session_over(), of each."""
        for host in self.values():
            host.session_over()
