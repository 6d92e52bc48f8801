"""Announcements: what the directory has to be told. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvsieve_store.protocol.limits import KEY_BYTES


class Change(NamedTuple):
    """That a store holds a block from now on, or does not.

    held: which of the two. store: its number in the directory. family_id, key: 32 bytes each.
    """

    held: bool
    store: int
    family_id: bytes
    key: bytes


class _Chunk(NamedTuple):
    """Changes that came together. keys: 32 bytes each, end to end."""

    held: bool
    store: int
    family_id: bytes
    keys: bytes

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


class Announcements:
    """First in, first out: so the last word on a block is what happened to it last. To add costs no more for
    many keys than for one.

    dropped: changes that there was no room for; only grows.
    """

    def __init__(self, limit: int) -> None:
        """limit: most changes at a time."""
        self._limit = limit
        self._chunks: deque[_Chunk] = deque()
        self._skip = 0  # changes of the first chunk that are done
        self._count = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._count

    def add(self, held: bool, store: int, family_id: bytes, keys: bytes) -> bool:
        """keys: 32 bytes each, end to end. False when they had to be dropped."""
        chunk = _Chunk(held, store, family_id, keys)
        if self._count + len(chunk) > self._limit:
            self.dropped += len(chunk)
            return False
        if keys:
            self._chunks.append(chunk)
            self._count += len(chunk)
        return True

    def first(self, count: int) -> list[Change]:
        """The oldest `count` changes, or all; they stay until done()."""
        found: list[Change] = []
        skip = self._skip
        for chunk in self._chunks:
            stop = min(len(chunk), skip + count - len(found))
            found += (
                Change(
                    chunk.held, chunk.store, chunk.family_id, chunk.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                )
                for i in range(skip, stop)
            )
            skip = 0
            if len(found) == count:
                break
        return found

    def done(self, count: int) -> None:
        """The directory knows the oldest `count` changes."""
        assert count <= self._count
        self._count -= count
        self._skip += count
        while self._chunks and self._skip >= len(self._chunks[0]):
            self._skip -= len(self._chunks.popleft())

    def clear(self) -> None:
        """Forgets all of them, uncounted: for who is going to announce everything anew."""
        self._chunks.clear()
        self._skip = self._count = 0
