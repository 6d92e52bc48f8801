"""Memory: buffers end to end in one space of offsets, and no way past their ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsieve_store.errors import InvalidRequestError

U64Array = NDArray[np.uint64]


class Memory:
    """What a transport may read from or write to: the segments of an arena, say.

    buffers: uint8 [bytes] each, writable. Offset 0 is the first byte of the first, and the next follows
    without a gap, as extents are counted through the segments of an arena.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        self.views = [buffer.data.cast("B") for buffer in buffers]
        sizes = [len(view) for view in self.views]
        self.size = sum(sizes)
        self.bases: U64Array = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
        self._ends: U64Array = np.cumsum(sizes, dtype=np.uint64)
        self._starts: U64Array = self._ends - np.array(sizes, np.uint64)

    def locate(self, offsets: ArrayLike, lengths: ArrayLike) -> tuple[NDArray[np.intp], U64Array, U64Array]:
        """Buffer of each range, offset in it, length. Raises InvalidRequestError for a range that is empty or
        does not lie inside one buffer."""
        at, n = np.broadcast_arrays(np.asarray(offsets, np.uint64), np.asarray(lengths, np.uint64))
        buffer = np.searchsorted(self._ends, at, side="right")
        inside = np.minimum(buffer, max(len(self.views) - 1, 0))
        if not self.views:
            raise InvalidRequestError("memory: there is none")
        # No sum of numbers that came from elsewhere: it could overflow.
        bad = (
            (buffer >= len(self.views))
            | (n == 0)
            | (n > self._ends[inside] - np.minimum(at, self._ends[inside]))
        )
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidRequestError(
                f"range {i}: {n[i]} bytes at {at[i]} given, which are not inside one of {len(self.views)} "
                f"buffers of {self.size} bytes in all"
            )
        return inside, at - self._starts[inside], n

    def addresses(self, offsets: ArrayLike, lengths: ArrayLike) -> U64Array:
        """Address of each range in this process. Raises as locate()."""
        buffer, at, _ = self.locate(offsets, lengths)
        found: U64Array = self.bases[buffer] + at
        return found

    def pieces(self, offsets: ArrayLike, lengths: ArrayLike) -> U64Array:
        """[n, 2] uint64: address in this process and length of the ranges, in order; what lies end to end is
        one. A vectored system call takes it as it is. Raises as locate()."""
        buffer, at, n = self.locate(offsets, lengths)
        starts = self.bases[buffer] + at
        first = np.ones(len(n), np.bool_)
        first[1:] = (buffer[1:] != buffer[:-1]) | (starts[1:] != (starts + n)[:-1])
        firsts = np.flatnonzero(first)
        return np.stack([starts[firsts], np.add.reduceat(n, firsts)], axis=1)

    def slices(self, offsets: ArrayLike, lengths: ArrayLike) -> list[memoryview]:
        """A view of each range. Raises as locate()."""
        buffer, at, n = self.locate(offsets, lengths)
        views = self.views
        return [
            views[b][a:e] for b, a, e in zip(buffer.tolist(), at.tolist(), (at + n).tolist(), strict=True)
        ]

    def close(self) -> None:
        """Lets go of the buffers. Nobody may be reading."""
        for view in self.views:
            view.release()
        self.views = []
