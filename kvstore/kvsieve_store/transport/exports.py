"""Exports: which blocks a peer may read, for as long as its token is good."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.errors import CapacityError, InvalidRequestError, NotFoundError
from kvsieve_store.protocol.layers import Counts, LayerOrder
from kvsieve_store.transport import wire
from kvsieve_store.transport.memory import Memory, U64Array

_NOTHING = np.zeros(0, np.uint64)


@dataclass(eq=False, slots=True)
class Growing:
    """The last blocks of an export, that are still being written.

    first: place of the first one. layers: [n] int64, of each: complete layers, set by who watches them.
    """

    first: int
    order: LayerOrder
    layers: Counts

    def forbids(self, ranges: U64Array) -> NDArray[np.bool_]:
        """Ranges, of blocks of the export, with bytes that are not there yet."""
        block, at, length = ranges.T
        place = block.astype(np.int64) - self.first
        mine = (place >= 0) & (place < len(self.layers))
        layers = np.where(mine, self.layers[np.where(mine, place, 0)], self.order.sealed)
        return ~self.order.allows(layers, at, length)


@dataclass(eq=False, slots=True)
class Export:
    """Blocks that stay where they are until the export is closed and nobody reads from it.

    offsets: [blocks] uint64, of each block in the memory. block_bytes: size of each. growing: those of which
    a part can be read; None: there are none.
    readers: answers that are being sent. on_drained: called once, when it is closed and has no readers.
    """

    offsets: U64Array
    block_bytes: int
    growing: Growing | None = None
    readers: int = 0
    on_drained: Callable[[], None] | None = None

    def ranges(self, ranges: U64Array) -> tuple[U64Array, U64Array]:
        """Offsets in the memory, and lengths. Raises InvalidRequestError for a range that is not inside a
        block of this export, or for more than one answer may carry.

        ranges: [n, 3] uint64: block, offset in it, length.
        """
        block, at, length = ranges.T
        size = np.uint64(self.block_bytes)
        bad = (
            (block >= len(self.offsets))
            | (length == 0)
            | (length > size)
            | (at > size - np.minimum(length, size))
        )
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidRequestError(
                f"ranges[{i}]: {length[i]} bytes at {at[i]} of block {block[i]} given; the export has "
                f"{len(self.offsets)} blocks of {self.block_bytes} bytes"
            )
        if self.growing is not None and (early := self.growing.forbids(ranges)).any():
            i = int(np.argmax(early))
            raise InvalidRequestError(
                f"ranges[{i}]: {length[i]} bytes at {at[i]} of block {block[i]} given, which is still being "
                "written; its complete layers can be read"
            )
        # At most 1,024 lengths, none above the block's size: Python's sum can't overflow.
        if (asked := sum(length.tolist())) > wire.MAX_READ_BYTES:
            raise InvalidRequestError(f"ranges: {asked} bytes given, at most {wire.MAX_READ_BYTES} allowed")
        return self.offsets[block.astype(np.intp)] + at, length

    def answer(self, request: wire.Request) -> tuple[bytes, U64Array, U64Array]:
        """The body of the reply: these bytes, or the memory's ranges at these offsets, of these lengths.
        Raises as ranges()."""
        if request.kind is wire.Kind.CONFIRM:
            return b"", _NOTHING, _NOTHING
        offsets, lengths = self.ranges(request.ranges)
        if request.kind is wire.Kind.LOCATE:
            return offsets.astype("<u8").tobytes(), _NOTHING, _NOTHING
        return b"", offsets, lengths


class Exports:
    """Every export of a store, by token. Safe to use from any thread.

    limit: most exports at a time.
    """

    def __init__(self, memory: Memory, limit: int = 1024) -> None:
        self.memory = memory
        self._limit = limit
        self._lock = threading.Lock()
        self._by_token: dict[bytes, Export] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def open(self, offsets: U64Array, block_bytes: int, growing: Growing | None = None) -> bytes:
        """Lets whoever has the token, 16 random bytes, read these blocks.

        offsets: [blocks] uint64, of each block in the memory. growing: as in Export.
        Raises InvalidRequestError for blocks outside the memory, CapacityError when there are too many
        exports.
        """
        if not 1 <= len(offsets) <= wire.MAX_BLOCKS:
            raise InvalidRequestError(f"blocks: {len(offsets)} given, 1 to {wire.MAX_BLOCKS} allowed")
        self.memory.locate(offsets, block_bytes)
        export = Export(np.array(offsets, np.uint64), block_bytes, growing)
        token = secrets.token_bytes(wire.TOKEN_BYTES)
        with self._lock:
            if len(self._by_token) >= self._limit:
                raise CapacityError(f"exports: {self._limit} are open, the most; try again later")
            self._by_token[token] = export
        return token

    def close(self, token: bytes, on_drained: Callable[[], None] = lambda: None) -> None:
        """Takes the token back: nothing is answered under it from now on.

        on_drained: called once, in any thread, as soon as no answer is being sent any more; the blocks may be
        reused then. At once when the token is unknown.
        """
        with self._lock:
            export = self._by_token.pop(token, None)
            if export is not None and export.readers:
                export.on_drained = on_drained
                return
        on_drained()

    def begin(self, token: bytes) -> Export:
        """The export of a token, with one more reader, until end(). Raises NotFoundError."""
        with self._lock:
            export = self._by_token.get(token)
            if export is None:
                raise NotFoundError("token: no such export; the transfer is over, or was never allowed")
            export.readers += 1
            return export

    def end(self, export: Export) -> None:
        """Says that an answer has been sent, or never will be."""
        with self._lock:
            export.readers -= 1
            drained = None if export.readers else export.on_drained
            if drained is not None:
                export.on_drained = None
        if drained is not None:
            drained()

    @contextmanager
    def reading(self, token: bytes) -> Iterator[Export]:
        """begin() and end()."""
        export = self.begin(token)
        try:
            yield export
        finally:
            self.end(export)
