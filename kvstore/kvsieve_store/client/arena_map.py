"""The arena, mapped: every slot as a view of shared memory, without copies."""

from __future__ import annotations

import bisect
import fcntl
import os
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvsieve_store.client.arena_memory import ArenaMemory, U8Array
from kvsieve_store.client.handles import Attachment
from kvsieve_store.errors import InvalidRequestError, UnavailableError
from kvsieve_store.protocol.layout import HEADER_BYTES, HEADER_GENERATION, HEADER_LAYERS_DONE, MAX_WRITERS

U64Array = npt.NDArray[np.uint64]


class ArenaMap:
    """All segments of a store's arena, mapped shared, with the session's lock held until close() or update().

    Each process that touches slots makes its own map from the client's Attachment. Maps of several sessions
    with one store may share their memory; each has a lock of its own. Views stay readable after close(),
    because the memory is unmapped with the last of them; but the lock is gone then, and the store may give
    their slots to others.

    Not thread-safe against close() and update(); reads and writes of slots from many threads are fine.

    memory: what other maps of the same store can share. close() gives it up.
    segments: uint8 [bytes of the segment] each, whole, e.g. for registration with CUDA.
    """

    memory: ArenaMemory
    segments: list[U8Array]
    _words64: list[U64Array]
    _words16: list[npt.NDArray[np.uint16]]
    _ends: list[int]
    _addresses: list[int]
    _headers: list[memoryview]

    def __init__(self, attachment: Attachment, memory: ArenaMemory | None = None) -> None:
        """memory: shared if it is of the same store instance, so that only what it lacks is mapped.

        Raises UnavailableError when the session or the store behind the attachment is gone.
        """
        self._lock: int | None = None
        self._attach(attachment, memory)

    def update(self, attachment: Attachment) -> None:
        """Moves to a newer attachment. The same store instance keeps the mapping, and what it has grown by is
        mapped in addition; another one is mapped anew.

        Views of another instance's memory keep their old bytes. Raises as the constructor does; the map is
        unchanged then.
        """
        self._attach(attachment, self.memory)

    def close(self) -> None:
        """Gives up the lock and the mapping. May be called again."""
        self._unlock()
        self.memory = ArenaMemory(self.memory.instance)
        self.segments = []
        self._addresses, self._headers = [], []
        self._words64, self._words16, self._ends = [], [], []

    def slot(self, slot: int) -> U8Array:
        """The bytes of a slot: a uint8 view [slot_bytes]."""
        segment, extent, i = self._locate(slot)
        at = extent + self.attachment.slots_offset + i * self.attachment.slot_bytes
        return self.segments[segment][at : at + self.attachment.slot_bytes]

    def address(self, slot: int) -> int:
        """Address of a slot in this process, for copies that take pointers; good while mapped."""
        extent, i = divmod(slot, self.attachment.slots_per_extent)
        if not 0 <= extent < len(self._addresses):
            self._locate(slot)  # raises
        return self._addresses[extent] + i * self.attachment.slot_bytes

    def generation(self, slot: int) -> int:
        """The generation in a slot's header: what SlotRef.generation was when the slot was granted last."""
        segment, extent, i = self._locate(slot)
        return int(self._words64[segment][(extent + i * HEADER_BYTES + HEADER_GENERATION) // 8])

    def generations(self, slots: Sequence[int]) -> U64Array:
        """uint64 [len(slots)]: generation() of each."""
        numbers = np.asarray(slots, np.int64)
        extents, places = np.divmod(numbers, self.attachment.slots_per_extent)
        segments = np.searchsorted(self._ends, extents, side="right")
        if (bad := np.flatnonzero((extents < 0) | (segments == len(self._ends)))).size:
            self._locate(int(numbers[bad[0]]))
        firsts = np.asarray([0, *self._ends])[segments]
        words = (
            (extents - firsts) * self.attachment.extent_bytes + places * HEADER_BYTES + HEADER_GENERATION
        ) // 8
        found = np.empty(len(numbers), np.uint64)
        for segment in np.unique(segments):
            here = segments == segment
            found[here] = self._words64[segment][words[here]]
        return found

    def layers_done(self, slot: int, shard: int) -> int:
        """How many layers of a slot the writer of `shard` has finished."""
        segment, word = self._layers_word(slot, shard)
        return int(self._words16[segment][word])

    def set_layers_done(self, slot: int, shard: int, n: int) -> None:
        """Says that the first `n` layers of a slot are written by `shard`. Write the bytes first."""
        extent, i = divmod(slot, self.attachment.slots_per_extent)
        if not (0 <= extent < len(self._headers) and 0 <= shard < MAX_WRITERS):
            self._layers_word(slot, shard)  # raises
        self._headers[extent][(i * HEADER_BYTES + HEADER_LAYERS_DONE) // 2 + shard] = n

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self, attachment: Attachment, memory: ArenaMemory | None) -> None:
        lock = _lock_shared(attachment.lock_path)
        try:
            if memory is None or memory.instance != attachment.instance:
                memory = ArenaMemory(attachment.instance)
            segments = memory.map(attachment)
            _check_layout(attachment)
        except BaseException:
            os.close(lock)
            raise
        self._unlock()
        self._lock, self.memory, self.segments = lock, memory, segments
        self._index(attachment)

    def _index(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._words64 = [segment.view("<u8") for segment in self.segments]
        self._words16 = [segment.view("<u2") for segment in self.segments]
        # Number of the first extent after each segment.
        self._ends = list(accumulate(len(segment) // attachment.extent_bytes for segment in self.segments))

        # Per extent, for what is called once per layer and block: where slot 0 lies, and the header words.
        # An item of a memoryview costs a third of an array's.
        size = attachment.extent_bytes
        extents = [
            segment[at : at + size] for segment in self.segments for at in range(0, len(segment), size)
        ]
        self._addresses = [int(extent.ctypes.data) + attachment.slots_offset for extent in extents]
        self._headers = [extent[: attachment.slots_offset].view("<u2").data for extent in extents]

    def _locate(self, slot: int) -> tuple[int, int, int]:
        """Segment of a slot, offset of its extent in the segment, place of the slot in the extent."""
        extent, i = divmod(slot, self.attachment.slots_per_extent)
        segment = bisect.bisect_right(self._ends, extent)
        if extent < 0 or segment == len(self._ends):
            if self._lock is None:
                raise UnavailableError("the arena map is closed")
            slots = self._ends[-1] * self.attachment.slots_per_extent
            raise InvalidRequestError(f"slot: {slot} given, 0 to {slots - 1} allowed")
        first = self._ends[segment - 1] if segment else 0
        return segment, (extent - first) * self.attachment.extent_bytes, i

    def _layers_word(self, slot: int, shard: int) -> tuple[int, int]:
        if not 0 <= shard < MAX_WRITERS:
            raise InvalidRequestError(f"shard: {shard} given, 0 to {MAX_WRITERS - 1} allowed")
        segment, extent, i = self._locate(slot)
        return segment, (extent + i * HEADER_BYTES + HEADER_LAYERS_DONE) // 2 + shard

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _check_layout(attachment: Attachment) -> None:
    """Raises UnavailableError unless every slot lies in its extent, and every extent in its segment."""
    extent, slots = attachment.extent_bytes, attachment.slots_per_extent
    at, end = attachment.slots_offset, attachment.slots_offset + slots * attachment.slot_bytes
    if not (
        extent > 0
        and slots > 0
        and attachment.slot_bytes > 0
        and slots * HEADER_BYTES <= at
        and at % 8 == extent % 8 == 0
        and end <= extent
        and attachment.segments
        and all(size > 0 and size % extent == 0 for _, size in attachment.segments)
    ):
        raise UnavailableError(
            f"the store's layout makes no sense: {slots} slots of {attachment.slot_bytes} bytes from {at} on "
            f"in extents of {extent} bytes, in segments of {[size for _, size in attachment.segments]}"
        )


def _lock_shared(path: str) -> int:
    """Descriptor of the session's lock file, locked; closing it unlocks.

    The store takes the lock for itself, then removes the file, when a session is over. Holding the lock of a
    file that is still there therefore means that the session's slots are safe to touch.
    """
    gone = UnavailableError(f"the session of {path} is over; attach anew")
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise gone from None
    except OSError as error:
        raise UnavailableError(f"the session's lock {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise gone
    except (BlockingIOError, FileNotFoundError):
        os.close(lock)
        raise gone from None
    except BaseException:
        os.close(lock)
        raise
    return lock
