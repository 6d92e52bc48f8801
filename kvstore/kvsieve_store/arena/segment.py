"""One file of the arena, mapped whole."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.arena import syscalls


class Segment:
    """A file of shared memory.

    path, size: absolute, and bytes.
    view: [size] uint8, the mapping.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Creates and maps the file, mode 0600. Raises OSError."""
        self.path = path
        self.size = size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def populate(self, offset: int, length: int, page_bytes: int) -> None:
        """Faults pages in. Safe to run in several threads. Raises OSError when memory is short."""
        if not syscalls.populate(self._address + offset, length):
            self.view[offset : offset + length : page_bytes] = 0

    def reserve(self, offset: int, length: int) -> None:
        """Lets the file system set memory aside. Raises OSError when it has too little."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, offset, length)
        finally:
            os.close(fd)

    def bind_to_node(self, node: int) -> None:
        """Lets pages that are not there yet come from one NUMA node only. Raises OSError."""
        syscalls.bind_to_node(self._address, self.size, node)

    def close(self) -> None:
        """Unmaps. The file stays."""
        self.view = np.empty(0, np.uint8)
        # Somebody else's view of the mapping, if there is one, keeps it alive.
        with contextlib.suppress(BufferError):
            self._map.close()

    @property
    def _address(self) -> int:
        return int(self.view.ctypes.data)
