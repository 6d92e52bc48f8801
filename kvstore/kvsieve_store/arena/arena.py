"""The arena: its directory, its segments, their memory, and the slot headers in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.arena import capacity
from kvsieve_store.arena.directory import ArenaDirectory, remove_stale
from kvsieve_store.arena.locks import SessionLock
from kvsieve_store.arena.segment import Segment
from kvsieve_store.errors import CapacityError, SettingsError, UnavailableError
from kvsieve_store.protocol.layout import (
    HEADER_BYTES,
    HEADER_GENERATION,
    HEADER_LAYERS_DONE,
    MAX_WRITERS,
    ExtentLayout,
)
from kvsieve_store.sizes import exact_size

_STEP_BYTES = 64 << 20
_MAX_THREADS = 16
_WORD = 8


class Arena:
    """Shared memory that the store owns and engines map.

    segments: in order; extents are numbered through them.
    extent_bytes: size of an extent; no extent crosses a segment.
    """

    def __init__(
        self, directory: ArenaDirectory, segments: list[Segment], extent_bytes: int, page_bytes: int
    ) -> None:
        self.segments = segments
        self.extent_bytes = extent_bytes
        self._directory = directory
        self._page_bytes = page_bytes
        self._extents_per_segment = segments[0].size // extent_bytes
        # One row per header-sized piece of a segment, [n, 16] uint64.
        self._rows = [s.view.view(np.uint64).reshape(-1, HEADER_BYTES // _WORD) for s in segments]
        # Headers that each extent had under its last layout.
        self._headers = np.zeros(sum(s.size for s in segments) // extent_bytes, np.int64)
        self._slot_bytes = np.zeros_like(self._headers)
        self._session_numbers = count(1)

    @staticmethod
    def create(
        mount: Path,
        pool_size: int,
        extent_bytes: int,
        segment_bytes: int,
        *,
        store: str,
        hugetlbfs: bool = False,
        numa_node: int | None = None,
    ) -> Arena:
        """Creates and maps the files, after a check that they fit; removes a dead predecessor's.

        mount: a tmpfs mount, or a hugetlbfs mount with hugetlbfs=True.
        pool_size, extent_bytes, segment_bytes: bytes; pool_size is rounded down to whole extents.
        store: the store's first address.
        Raises CapacityError (nothing was created), SettingsError.
        """
        if not mount.is_dir():
            raise SettingsError(f"{'hugepages' if hugetlbfs else 'shm_dir'}: {mount} is not a directory")
        size = pool_size // extent_bytes * extent_bytes
        remove_stale(mount, store)
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        if hugetlbfs:
            page_bytes = capacity.huge_page_bytes(mount)
            if extent_bytes % page_bytes:
                raise SettingsError(
                    f"extent_size: {exact_size(extent_bytes)} given, a multiple of the huge page of {mount} "
                    f"({exact_size(page_bytes)}) required"
                )
            capacity.check_hugetlbfs(mount, size, page_bytes)
        else:
            capacity.check_tmpfs(mount, size)
        try:
            directory = ArenaDirectory(mount, store)
        except OSError as error:
            raise SettingsError(
                f"{'hugepages' if hugetlbfs else 'shm_dir'}: can't create the arena's directory "
                f"in {mount}: {error.strerror}"
            ) from None
        segments: list[Segment] = []
        try:
            for i, start in enumerate(range(0, size, segment_bytes)):
                segments.append(Segment(directory.path / f"seg-{i:03}", min(segment_bytes, size - start)))
                if numa_node is not None:
                    _bind(segments[-1], numa_node)
        except BaseException as error:
            for segment in segments:
                segment.close()
            directory.close()
            if isinstance(error, OSError):
                raise CapacityError(
                    f"pool_size: can't map {exact_size(size)} in {mount}: {error.strerror}"
                ) from None
            raise
        return Arena(directory, segments, extent_bytes, page_bytes)

    @property
    def path(self) -> Path:
        """Directory of the arena's files."""
        return self._directory.path

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    def prefault(
        self,
        progress: Callable[[float], None] = lambda share: None,
        stop: threading.Event | None = None,
        threads: int | None = None,
    ) -> None:
        """Faults all pages in, in parallel. Blocks; returns early when `stop` is set.

        progress: called in this thread with the share that is done, 0 to 1.
        Raises CapacityError when memory runs out.
        """
        stop = stop or threading.Event()
        # The kernel serialises faults per file, so neighbours in the queue are of different files.
        steps = [
            (segment, offset)
            for offset in range(0, self.segments[0].size, _STEP_BYTES)
            for segment in self.segments
            if offset < segment.size
        ]

        def run(segment: Segment, offset: int) -> int:
            if stop.is_set():
                return 0
            length = min(_STEP_BYTES, segment.size - offset)
            segment.populate(offset, length, self._page_bytes)
            return length

        done = 0
        workers = min(threads or os.cpu_count() or 1, _MAX_THREADS, len(steps))
        with ThreadPoolExecutor(workers, thread_name_prefix="prefault") as pool:
            for future in as_completed([pool.submit(run, *step) for step in steps]):
                try:
                    done += future.result()
                except OSError as error:
                    stop.set()
                    raise CapacityError(
                        f"pool_size: memory ran out at {exact_size(done)} of {exact_size(self.size)}: "
                        f"{error.strerror}; lower --pool-size"
                    ) from None
                progress(done / self.size)

    def reserve(self, stop: threading.Event | None = None) -> None:
        """Takes the memory without touching it: a tmpfs that fills up later would kill whoever writes.

        Blocks; returns early when `stop` is set. Raises CapacityError when memory runs out.
        """
        done = 0
        for segment in self.segments:
            for offset in range(0, segment.size, _STEP_BYTES):
                if stop is not None and stop.is_set():
                    return
                length = min(_STEP_BYTES, segment.size - offset)
                try:
                    segment.reserve(offset, length)
                except OSError as error:
                    raise CapacityError(
                        f"pool_size: memory ran out at {exact_size(done)} of {exact_size(self.size)}: "
                        f"{error.strerror}; lower --pool-size"
                    ) from None
                done += length

    def write_generations(
        self, layout: ExtentLayout, slots: NDArray[np.uint32], generations: NDArray[np.uint32]
    ) -> None:
        """Writes the headers of slots that are about to be granted, and clears their layers_done.

        slots, generations: [n], slot numbers of a pool of this layout. An extent that comes from a pool with
        another layout loses its old headers first, so that a late reader of the old pool can't mistake new
        bytes for its own.
        """
        extents, index = np.divmod(slots.astype(np.int64), layout.slots_per_extent)
        for extent in set(extents.tolist()):
            if self._slot_bytes[extent] != layout.slot_bytes:
                self._extent_rows(extent)[: self._headers[extent], HEADER_GENERATION // _WORD] = 0
                self._headers[extent] = layout.slots_per_extent
                self._slot_bytes[extent] = layout.slot_bytes
        segments, extents = np.divmod(extents, self._extents_per_segment)
        rows = (extents * self.extent_bytes) // HEADER_BYTES + index
        for segment in set(segments.tolist()):
            mine = segments == segment
            self._rows[segment][rows[mine], HEADER_GENERATION // _WORD] = generations[mine]
            self._rows[segment][rows[mine], HEADER_LAYERS_DONE // _WORD :] = 0

    def layers_done(self, layout: ExtentLayout, slots: NDArray[np.uint32]) -> NDArray[np.uint16]:
        """What writers say of slots of a pool of this layout: [n, 32] uint16, by shard."""
        extents, index = np.divmod(slots.astype(np.int64), layout.slots_per_extent)
        segments, extents = np.divmod(extents, self._extents_per_segment)
        rows = (extents * self.extent_bytes) // HEADER_BYTES + index
        found = np.empty((len(slots), MAX_WRITERS), np.uint16)
        for segment in set(segments.tolist()):
            mine = segments == segment
            words = self._rows[segment][rows[mine], HEADER_LAYERS_DONE // _WORD :]
            found[mine] = np.ascontiguousarray(words).view(np.uint16)
        return found

    def new_session_lock(self) -> SessionLock:
        """A lock file for one more session. Raises UnavailableError when there can be none."""
        try:
            return SessionLock(self.path / f"session-{next(self._session_numbers)}.lock")
        except OSError as error:
            raise UnavailableError(
                f"arena: can't create a lock file in {self.path}: {error.strerror}"
            ) from None

    def missing(self) -> Path | None:
        """What engines need to attach and don't find any more; None when all is there."""
        if not self._directory.is_there():
            return self.path
        return next((s.path for s in self.segments if not s.path.exists()), None)

    def close(self) -> None:
        """Unmaps and unlinks everything."""
        self._rows.clear()
        for segment in self.segments:
            segment.close()
        self._directory.close()

    def _extent_rows(self, extent: int) -> NDArray[np.uint64]:
        segment, i = divmod(extent, self._extents_per_segment)
        per_extent = self.extent_bytes // HEADER_BYTES
        return self._rows[segment][i * per_extent : (i + 1) * per_extent]


def _bind(segment: Segment, node: int) -> None:
    try:
        segment.bind_to_node(node)
    except OSError as error:
        raise SettingsError(f"numa_node: can't bind memory to node {node}: {error.strerror}") from None
