"""A store's memory in this process: each segment mapped once, whatever the number of sessions."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvsieve_store.client.handles import Attachment
from kvsieve_store.errors import UnavailableError
from kvsieve_store.protocol.layout import STORE_LOCK

U8Array = npt.NDArray[np.uint8]


class ArenaMemory:
    """Segments of one store process, mapped shared. They are unmapped with this object and the last view.

    Not thread-safe, but for store_lives().

    instance: the store's, as in Attachment. It is what says that two attachments mean the same memory.
    """

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self._segments: dict[tuple[str, int], U8Array] = {}

    def map(self, attachment: Attachment) -> list[U8Array]:
        """The attachment's segments in order, uint8 [bytes of the segment] each.

        Maps those that are not mapped yet: all of them at first, later what the arena has grown by. Raises
        UnavailableError, and has mapped nothing then.
        """
        new = {segment: _map(*segment) for segment in attachment.segments if segment not in self._segments}
        self._segments |= new
        return [self._segments[segment] for segment in attachment.segments]

    def store_lives(self) -> bool:
        """Whether the store process is there still: nobody else holds the lock beside the segments. It counts
        as alive where that can't be found out now, e.g. for want of file descriptors."""
        directory = next((Path(path).parent for path, _ in self._segments), None)
        if directory is None:
            return False
        try:
            lock = os.open(directory / STORE_LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False


def _map(path: str, size: int) -> U8Array:
    """uint8 [size], writable, shared. The view owns the mapping."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UnavailableError(f"segment {path} is gone: the store has ended; attach anew") from None
    except OSError as error:
        raise UnavailableError(f"segment {path}: {error.strerror}") from None
    try:
        if (there := os.fstat(file).st_size) < size:
            raise UnavailableError(f"segment {path}: {there} bytes there, {size} expected; attach anew")
        return np.frombuffer(mmap.mmap(file, size, mmap.MAP_SHARED), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: it has shrunk just now
        raise UnavailableError(f"segment {path}: can't map {size} bytes: {error}") from None
    finally:
        os.close(file)
