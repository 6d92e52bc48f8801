"""Whom to ask for a chain of blocks, by a few looks instead of one a block. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PROBES = 64
"""Most keys of a look; two looks find the end of a chain of 4,096."""


@dataclass(frozen=True)
class Holder:
    """A store that says to have blocks of a chain.

    store: its number in the directory. address: of its control plane. blocks: how many of the keys, from the
    first on, if it has all before the last one that it was found to have; stores evict children first.
    """

    store: int
    address: str
    blocks: int


def probes(start: int, stop: int) -> list[int]:
    """At most PROBES positions of [start, stop), evenly spread, both ends among them."""
    last = stop - start - 1
    if last < PROBES:
        return list(range(start, stop))
    return [start + i * last // (PROBES - 1) for i in range(PROBES)]


class Search:
    """What the looks have found so far.

    seen: by store, the positions at which it was found.
    """

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._probed: list[int] = []
        self.seen: dict[int, list[int]] = {}

    def found(self, positions: Sequence[int], stores: Iterable[Iterable[int]]) -> None:
        """One look: which stores have the key at each position."""
        self._probed += positions
        for position, there in zip(positions, stores, strict=True):
            for store in there:
                self.seen.setdefault(store, []).append(position)

    def next_look(self, live: Iterable[int]) -> list[int]:
        """Positions worth a look: first from end to end, then from where the best of the live stores was
        found to the next position at which none was. None when that would tell no more."""
        if not self._probed:
            return probes(0, self._keys)
        best = max((self._last(store) for store in live if store in self.seen), default=-1)
        beyond = [position for position in self._probed if position > best]
        if best < 0 or not beyond:
            return []
        return probes(best + 1, min(beyond))

    def holders(self, addresses: dict[int, str], rng: random.Random) -> list[Holder]:
        """Of the stores with an address, who has the most first; equals in random order."""
        found = [
            Holder(store, addresses[store], self._last(store) + 1)
            for store in self.seen
            if store in addresses
        ]
        rng.shuffle(found)
        return sorted(found, key=lambda holder: -holder.blocks)

    def _last(self, store: int) -> int:
        return max(self.seen[store])
