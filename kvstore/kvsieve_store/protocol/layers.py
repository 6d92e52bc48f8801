"""Which bytes of a slot are there when its layers are written one after another."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvsieve_store.protocol.layout import MAX_WRITERS, SlotLayout
from kvsieve_store.protocol.spec import PoolSpec

U64Array = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

MOST = 1 << 17
"""Layers times runs of a pool whose blocks can be read while they are written."""


class LayerOrder:
    """Layers of a slot in the order in which they are written: through the planes, of all shards.

    A run is what a shard has of a plane, up to the next run or the end of the slot. sealed: stands for all
    bytes, those between and behind runs included; one more than there are layers.
    """

    def __init__(self, spec: PoolSpec) -> None:
        layout = SlotLayout.of(spec)
        self.sealed = sum(len(plane.layer_bytes) for plane in spec.planes) + 1
        self.slot_bytes = layout.slot_bytes
        starts, ends = [], []
        self._words: list[tuple[int, int, int, int]] = []
        # A writer counts the layers that it writes: what is replicated is the first one's part.
        first, sharded = 0, 0
        for plane, shards in zip(spec.planes, layout.layer_offsets, strict=True):
            count = len(plane.layer_bytes)
            for shard, layers in enumerate(shards):
                starts.append(layers[0])
                run = np.full(self.sealed, layers[-1] + plane.layer_bytes[-1], np.uint64)
                run[:first] = layers[0]
                run[first : first + count] = layers
                ends.append(run)
                self._words.append((shard, sharded if shard else first, first, count))
            first += count
            sharded += count if plane.shards > 1 else 0
        whole = np.array([*starts[1:], layout.slot_bytes], np.uint64)
        self.starts: U64Array = np.array(starts, np.uint64)
        self.ends: U64Array = np.vstack([np.stack(ends, axis=1), whole])
        """[sealed + 1, runs]: where the readable bytes of each run end, by layers that are there."""

    @staticmethod
    @lru_cache(maxsize=16)
    def of(spec: PoolSpec) -> LayerOrder | None:
        """None for a pool of so many layers and shards that nobody needs it."""
        layers = sum(len(plane.layer_bytes) for plane in spec.planes)
        runs = sum(plane.shards for plane in spec.planes)
        return LayerOrder(spec) if layers * runs <= MOST else None

    def complete(self, words: npt.NDArray[np.uint16]) -> Counts:
        """Layers that all shards have written: [n], 0 to sealed - 1. words: [n, 32], `layers_done` of each
        slot's header, which anyone may have written."""
        assert words.shape[1] == MAX_WRITERS
        found = np.full(len(words), self.sealed - 1, np.int64)
        for word, before, first, count in self._words:
            done = words[:, word].astype(np.int64) - before
            np.minimum(
                found, np.where(done >= count, self.sealed - 1, first + np.maximum(done, 0)), out=found
            )
        return found

    def allows(self, layers: Counts, at: U64Array, length: U64Array) -> npt.NDArray[np.bool_]:
        """Whether ranges inside a slot have nothing but layers that are there. layers: of each range's
        slot."""
        run = np.searchsorted(self.starts, at, side="right") - 1
        return (layers >= self.sealed) | (at + length <= self.ends[layers, run])

    def between(self, first: int, last: int) -> U64Array:
        """[n, 2]: offset and length of what is there with `last` layers, and not with `first`."""
        sizes = self.ends[last] - self.ends[first]
        there = sizes > 0
        return np.stack((self.ends[first][there], sizes[there]), axis=1)

    def prefix(self, layers: int) -> int:
        """Bytes from the start of a slot on that are there without a gap."""
        short = np.flatnonzero(self.ends[layers] < self.ends[self.sealed])
        return int(self.ends[layers][short[0]]) if len(short) else self.slot_bytes
