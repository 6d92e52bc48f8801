"""What the client hands out: slots, matches, seals, and the attachment that another process maps from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple, overload

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.client.checks import MAX_SECONDS, UINT32, check_seconds, check_whole


class ClientState(StrEnum):
    """connecting: no session, trying to get one (at first, after a loss, or while the store prefaults).
    attached: all verbs work. draining: the store is about to stop; no new credits or matches.
    refused: the store said no to this client's Hello; tried again slowly. closed: for good.
    """

    CONNECTING = "connecting"
    ATTACHED = "attached"
    DRAINING = "draining"
    REFUSED = "refused"
    CLOSED = "closed"


class SlotRef(NamedTuple):
    """One use of a slot. Means something only in the epoch (Attachment.epoch) that it was taken in."""

    slot: int
    generation: int


class SlotRefs(Sequence[SlotRef]):
    """Many SlotRefs, made as they are read: to make a thousand takes as long as the call that brings them.

    Equal to a tuple of the same SlotRefs; a slice is such a tuple.
    """

    __slots__ = ("_generations", "_slots")

    def __init__(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self._slots = slots
        self._generations = generations

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> SlotRef: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SlotRef, ...]: ...
    def __getitem__(self, index: int | slice) -> SlotRef | tuple[SlotRef, ...]:
        if isinstance(index, slice):
            return tuple(map(SlotRef, self._slots[index], self._generations[index]))
        return SlotRef(self._slots[index], self._generations[index])

    def __iter__(self) -> Iterator[SlotRef]:
        return map(SlotRef, self._slots, self._generations)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, SlotRefs | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Match:
    """The longest sealed prefix of the keys asked for.

    refs: one per matched block, in order; len(refs) is the number of matched blocks.
    lease_ids: what to give to release() once the blocks are read; empty when nothing was leased.
    epoch: the epoch that refs and leases belong to; 0 when nothing was asked.
    fetched: of the blocks, those that the store brought from other stores for this match.
    """

    refs: Sequence[SlotRef] = ()
    lease_ids: tuple[int, ...] = ()
    epoch: int = 0
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a match may do beyond a look into its own store, when that has a directory.

    seconds: longest time for it. min_blocks: fewest blocks missing for which it is done; 1 or more.
    """

    seconds: float
    min_blocks: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidRequestError."""
        check_seconds("fetch.seconds", self.seconds, MAX_SECONDS)
        check_whole("fetch.min_blocks", self.min_blocks, 1, UINT32)


class SealEntry(NamedTuple):
    """A written block.

    key: 32 bytes. parent: key of the block before, 32 bytes; b"" for the first block of a chain.
    """

    key: bytes
    parent: bytes
    ref: SlotRef


class SealResult(Enum):
    """SEALED: findable from now on. DUPLICATE: the key was there; the older block stays, the slot is free
    again, or after a hold still the caller's."""

    SEALED = pb.SEAL_STATUS_SEALED
    DUPLICATE = pb.SEAL_STATUS_DUPLICATE


@dataclass(frozen=True, slots=True)
class Held:
    """What seal(..., hold=True) did. All its slots stay readable until they are released.

    results: one per entry. SEALED: leased. DUPLICATE: the slot still belongs to the caller, unsealed.
    lease_ids: what to give to release() for the sealed ones: the lease that they were added to, or a new one;
    empty when none was sealed.
    epoch: the epoch that slots and leases belong to; 0 when nothing was asked.
    """

    results: list[SealResult] = field(default_factory=list)
    lease_ids: tuple[int, ...] = ()
    epoch: int = 0

    def kept(self, entries: Sequence[SealEntry]) -> list[SlotRef]:
        """Slots of the duplicates, to give to release(). entries: those given to seal()."""
        pairs = zip(entries, self.results, strict=False)
        return [entry.ref for entry, result in pairs if result is SealResult.DUPLICATE]

    def new_leases(self, lease: int) -> list[int]:
        """The leases but for the one that was given to seal()."""
        return [made for made in self.lease_ids if made != lease]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did. Nothing of it is leased: match() says what is there.

    present: how many of the keys, from the first on, the store has now.
    pulled: of these, brought by this call.
    damaged: blocks that came with the wrong bytes and were not taken.
    reason: why it is not all of them; empty if it is.
    """

    present: int
    pulled: int
    damaged: int
    reason: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """All that a process needs to map the arena (ArenaMap). Picklable, and holds no secret.

    epoch: goes up at each attach of this client; 1 is the first.
    instance: 16 random bytes per store process; another value means other memory.
    pool_id: SHA-256 of the pool's canonical spec.
    extent_bytes, slot_bytes, slots_per_extent, slots_offset: geometry, as protocol.layout.ExtentLayout.
    segments: (absolute path, bytes) of the arena's files, in order.
    lock_path: file to hold a shared flock(2) on while touching the session's slots or leased blocks.
    store_version: version of the store software.
    peer_address: control address at which other stores reach this one; empty when it serves none.
    directory: whether the store has a directory, so that a match may fetch.
    max_slots: most slots that the pool may own; 0: all of the arena.
    """

    epoch: int
    instance: bytes
    pool_id: bytes
    extent_bytes: int
    segments: tuple[tuple[str, int], ...]
    slot_bytes: int
    slots_per_extent: int
    slots_offset: int
    lock_path: str
    store_version: str
    peer_address: str = ""
    directory: bool = False
    max_slots: int = 0

    @property
    def slots(self) -> int:
        """Most slots that the pool could ever have: its quota, or all of the arena, without other pools."""
        arena = sum(size for _, size in self.segments) // self.extent_bytes * self.slots_per_extent
        return min(arena, self.max_slots or arena)

    @staticmethod
    def of(welcome: pb.Welcome, epoch: int) -> Attachment:
        return Attachment(
            epoch=epoch,
            instance=welcome.arena.instance,
            pool_id=welcome.pool_id,
            extent_bytes=welcome.arena.extent_bytes,
            segments=tuple((segment.path, segment.bytes) for segment in welcome.arena.segments),
            slot_bytes=welcome.slot_bytes,
            slots_per_extent=welcome.slots_per_extent,
            slots_offset=welcome.slots_offset,
            lock_path=welcome.lock_path,
            store_version=welcome.store_version,
            peer_address=welcome.peer_address,
            max_slots=welcome.max_slots,
            directory=welcome.directory,
        )
