"""Announced: which keys slots will have that are being written now."""

from __future__ import annotations

from collections.abc import Iterable

from kvsieve_store.state.arrays import KeyArray, SlotArray


class Announced:
    """Pairs of a key and a writing slot, each in one pair at most. Matches don't see them.

    Empty but for hand-offs, so what is done for every slot starts with a look at that.
    """

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._holds: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> list[int]:
        """Of all pairs."""
        return list(self._keys)

    def add(self, keys: KeyArray, slots: SlotArray, hold: float = 0.0) -> None:
        """A key that is there stays with its slot; a slot that is there gets the new key. hold: seconds that
        the blocks are to stay, once sealed."""
        for row, slot in enumerate(slots.tolist()):
            key = keys[row].tobytes()
            if key not in self._slots:
                self._forget(slot)
                self._slots[key] = slot
                self._keys[slot] = key
                if hold:
                    self._holds[slot] = hold

    def find_prefix(self, keys: KeyArray, most: int) -> list[int]:
        """Slots of the longest announced prefix of `keys`, `most` at most."""
        found: list[int] = []
        for row in range(min(len(keys), most) if self._slots else 0):
            slot = self._slots.get(keys[row].tobytes())
            if slot is None:
                break
            found.append(slot)
        return found

    def holds(self, keys: KeyArray) -> list[tuple[int, int, float]]:
        """Of the keys that are in a pair: row, slot, and for how many seconds the block is to stay."""
        slots = [self._slots.get(keys[row].tobytes(), -1) for row in range(len(keys))]
        return [(row, slot, self._holds.get(slot, 0.0)) for row, slot in enumerate(slots) if slot >= 0]

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Forgets the pairs of slots; others are skipped."""
        for slot in slots if self._keys else ():
            self._forget(slot)

    def drop_keys(self, keys: KeyArray) -> None:
        """Forgets the pairs of keys; others are skipped."""
        for row in range(len(keys) if self._slots else 0):
            slot = self._slots.get(keys[row].tobytes())
            if slot is not None:
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._slots[key]
            self._holds.pop(slot, None)
