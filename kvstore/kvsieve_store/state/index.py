"""KeyIndex: from key to slot, without a Python object per key."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvsieve_store.state.arrays import KeyArray, SlotArray

LANES = 8
"""Entries of a bucket."""

_LANE_BITS = 3

_LOAD = 0.8

_ALL_AGREE = 0x01010101


class KeyIndex:
    """A hash table of buckets with two choices per key (Azar et al., "Balanced Allocations", 1994).

    A key is a SHA-256 already, so its own words serve as hashes: word 0 and word 1 choose the two buckets,
    word 2 gives a 16-bit tag that spares most look-ups of whole keys. An entry goes to the emptier bucket;
    when both are full it goes to a dict, which stays empty unless keys are made to collide. There are no
    tombstones: a removed entry leaves an empty lane.

    keys: [slots, 4] uint64, the pool's key column; the index holds slot numbers and compares with it.
    capacity: most keys at a time.
    """

    def __init__(self, keys: KeyArray, capacity: int) -> None:
        buckets = 1 << max(0, int(np.ceil(np.log2(max(1, capacity) / (LANES * _LOAD)))))
        self._keys = keys
        self._mask = np.uint64(buckets - 1)
        self._tags = np.zeros((buckets, LANES), np.uint16)
        self._slots = np.zeros((buckets, LANES), np.int32)
        self._flat_tags = self._tags.reshape(-1)
        self._flat_slots = self._slots.reshape(-1)
        self._overflow: dict[bytes, int] = {}

    def find(self, keys: KeyArray) -> SlotArray:
        """Slot of each key, -1 where it is unknown. keys: [n, 4] uint64 -> [n] intp."""
        found = self._find_by(0, keys)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            found[missing] = self._find_by(1, keys.take(missing, axis=0))
        if self._overflow:
            for row in np.flatnonzero(found < 0).tolist():
                found[row] = self._overflow.get(keys[row].tobytes(), -1)
        return found

    def insert(self, keys: KeyArray, slots: SlotArray) -> None:
        """Adds entries; the keys must differ from each other and from all that are in."""
        tags = _tags(keys)
        buckets = np.stack((self._buckets(keys, 0), self._buckets(keys, 1)), axis=1)
        left = np.arange(len(keys))
        while len(left):
            empty = self._slots.take(buckets[left], axis=0) == 0  # [left, 2, LANES]
            space = np.count_nonzero(empty, axis=2)
            choice = (space[:, 1] > space[:, 0]).astype(np.intp)
            here = np.arange(len(left))
            fits = space[here, choice] > 0
            if not fits.all():
                for row in left[~fits].tolist():
                    self._overflow[keys[row].tobytes()] = int(slots[row])
                left, choice, empty, here = left[fits], choice[fits], empty[fits], here[: fits.sum()]
            lanes = buckets[left, choice] * LANES + empty[here, choice].argmax(axis=1)
            # Two entries may have chosen one lane: the last write stays, the others try again.
            entries = slots[left] + 1
            self._flat_slots[lanes] = entries
            won = self._flat_slots[lanes] == entries
            self._flat_tags[lanes[won]] = tags[left[won]]
            left = left[~won]

    def remove(self, slots: SlotArray) -> None:
        """Removes the entries of `slots`, which must be in; their keys are read from the key column."""
        keys = self._keys.take(slots, axis=0)
        entries = (slots + 1)[:, None]
        missing = np.ones(len(slots), np.bool_)
        for word in (0, 1):
            buckets = self._buckets(keys, word)
            hits = np.flatnonzero(self._slots.take(buckets, axis=0) == entries)
            rows = hits // LANES
            lanes = buckets[rows] * LANES + hits % LANES
            self._flat_slots[lanes] = 0
            self._flat_tags[lanes] = 0
            missing[rows] = False
        if self._overflow:
            for row in np.flatnonzero(missing).tolist():
                del self._overflow[keys[row].tobytes()]

    def __len__(self) -> int:
        return int(np.count_nonzero(self._slots)) + len(self._overflow)

    def _find_by(self, word: int, keys: KeyArray) -> SlotArray:
        """find(), in the buckets that one of the two words chooses."""
        found = np.full(len(keys), -1, np.intp)
        buckets = self._buckets(keys, word)
        # take() of rows costs a fifth of indexing.
        hits = (self._tags.take(buckets, axis=0) == _tags(keys)[:, None]).reshape(-1).nonzero()[0]
        rows = hits >> _LANE_BITS
        slots = self._flat_slots[(buckets[rows] << _LANE_BITS) + (hits & (LANES - 1))] - 1
        # Four words that agree are four bytes of 1: faster than all(axis=1).
        agree = self._keys.take(slots, axis=0) == keys.take(rows, axis=0)
        same = agree.view(np.uint32)[:, 0] == _ALL_AGREE
        found[rows[same]] = slots[same]
        return found

    def _buckets(self, keys: KeyArray, word: int) -> SlotArray:
        return (keys[:, word] & self._mask).astype(np.intp)


def _tags(keys: KeyArray) -> npt.NDArray[np.uint16]:
    """16 bits of word 2, never 0: 0 marks an empty lane."""
    return keys[:, 2].astype(np.uint16) | np.uint16(1)
