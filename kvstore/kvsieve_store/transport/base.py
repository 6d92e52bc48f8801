"""The contract of a transport: a Link reads ranges of a peer's exported blocks into memory of this
process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np

from kvsieve_store.errors import InvalidRequestError, LinkError
from kvsieve_store.transport import wire
from kvsieve_store.transport.memory import Memory, U64Array

CHUNK_BYTES = wire.MAX_READ_BYTES
"""Bytes asked for by one request: what happens between two replies costs as much as a megabyte or two."""


QUIET_SECONDS = 2.5
"""A peer that sends no byte of an answer for so long is given up: the wire is cut, or the peer hangs. What is
slow is never silent for that long, and what loses packets only if it loses the same one four times."""


class Link(ABC):
    """A connection to one peer. One thread reads at a time; close() may come from any.

    Once read() has raised, or close() has returned, nothing that the peer sends later reaches the memory.
    transport: the name in metrics and logs. memory: where read() may write.
    """

    transport: ClassVar[str]

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @abstractmethod
    def read(self, token: bytes, ranges: U64Array, into: U64Array, deadline: float) -> None:
        """Reads all ranges, or raises; then any of them may have been written, wholly or in part.

        token: 16 bytes, of the export. ranges: [n, 3] uint64: block of the export, offset in it, length; as
        many as you like. into: [n] uint64, offset in `memory` per range. deadline: time.monotonic() seconds.
        Raises NotFoundError (the export is over), InvalidRequestError (a range is outside), LinkError (the
        peer is gone, or was not done by the deadline): after a LinkError the link is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the connection; a read in another thread raises LinkError. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def seconds_left(deadline: float) -> float:
    """Until `deadline`, time.monotonic() seconds; raises LinkError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise LinkError("the peer did not answer before the deadline")
    return left


def chunks(
    memory: Memory, ranges: U64Array, into: U64Array, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[U64Array, U64Array]]:
    """Ranges and their places, in requests of at most `chunk_bytes` and MAX_RANGES; longer ranges are split.

    Raises InvalidRequestError at once when something would be written outside the memory.
    """
    ranges = np.asarray(ranges, np.uint64).reshape(-1, 3)
    into = np.asarray(into, np.uint64)
    if len(ranges) != len(into):
        raise InvalidRequestError(f"into: {len(into)} entries given, {len(ranges)} required as in ranges")
    if not len(ranges):
        return iter(())
    memory.locate(into, ranges[:, 2])
    ranges, into = _split(ranges, into, chunk_bytes)
    return _group(ranges, into, chunk_bytes)


def _split(ranges: U64Array, into: U64Array, most: int) -> tuple[U64Array, U64Array]:
    """The same bytes in ranges of at most `most`."""
    pieces = -(-ranges[:, 2].astype(np.int64) // most)
    if (pieces == 1).all():
        return ranges, into
    row = np.repeat(np.arange(len(ranges)), pieces)
    step = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(
        np.uint64
    ) * np.uint64(most)
    split = ranges[row]
    split[:, 1] += step
    split[:, 2] = np.minimum(split[:, 2] - step, np.uint64(most))
    return split, into[row] + step


def _group(ranges: U64Array, into: U64Array, most: int) -> Iterator[tuple[U64Array, U64Array]]:
    ends = np.cumsum(ranges[:, 2])
    start, before = 0, 0
    while start < len(ranges):
        stop = int(np.searchsorted(ends, before + most, side="right"))
        stop = max(min(stop, start + wire.MAX_RANGES), start + 1)
        yield ranges[start:stop], into[start:stop]
        start, before = stop, int(ends[stop - 1])
