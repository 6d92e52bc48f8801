"""The transport between stores of one host: the peer's arena is mapped, and copied from.

The peer is asked, over TCP, where the blocks are and, after the copy, whether they were still exported; so
what was copied were their bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.errors import LinkError
from kvsieve_store.transport.base import Link, chunks
from kvsieve_store.transport.description import Segment
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.tcp import TcpLink


class ShmLink(Link):
    """A mapping of the peer's memory, and a connection to ask it."""

    transport = "shm"

    def __init__(self, peer: Memory, control: TcpLink) -> None:
        """peer: from map_peer(). control: used by this link alone, and closed with it."""
        super().__init__(control.memory)
        self._peer = peer
        self._control = control
        self._reading = threading.Lock()
        self._closed = False

    def read(self, token: bytes, ranges: U64Array, into: U64Array, deadline: float) -> None:
        work = chunks(self.memory, ranges, into)
        with self._reading:
            if self._closed:
                raise LinkError("the link is closed")
            for part, places in work:
                sources = self._peer.slices(self._control.locate(token, part, deadline), part[:, 2])
                for source, target in zip(sources, self.memory.slices(places, part[:, 2]), strict=True):
                    if self._closed:
                        raise LinkError("the link is closed")
                    # copyto() releases the GIL, a memoryview does not.
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            self._control.confirm(token, deadline)

    def close(self) -> None:
        self._closed = True
        self._control.close()
        with self._reading:
            self._peer = Memory([])


def boot_id() -> str:
    """Names this host, until it boots again."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def map_peer(segments: tuple[Segment, ...]) -> Memory | None:
    """The memory of a peer on this host, read-only; None when it can't be seen from here: another container,
    say, or another user."""
    found: list[NDArray[np.uint8]] = []
    for segment in segments:
        mapped = _map(segment)
        if mapped is None:
            return None
        found.append(mapped)
    return Memory(found)


def _map(segment: Segment) -> NDArray[np.uint8] | None:
    """The path is the peer's word: a FIFO there must not be waited for."""
    try:
        file = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):  # a NUL, or what is no text
        return None
    try:
        there = os.fstat(file)
        if not stat.S_ISREG(there.st_mode):
            return None
        if (there.st_dev, there.st_ino, there.st_size) != (segment.device, segment.inode, segment.size):
            return None
        return np.frombuffer(mmap.mmap(file, segment.size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
