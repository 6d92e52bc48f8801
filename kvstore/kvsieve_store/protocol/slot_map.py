"""SlotMap: which bytes of a slot of one pool lie where in a slot of another, of the same family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import Plane, PoolSpec

I64Array = npt.NDArray[np.int64]
U64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class SlotMap:
    """Pieces fill the target's payload, each byte once, in ascending order; its padding is in none.

    source_bytes, target_bytes: sizes of the slots. source, target, length: [n] uint64, of each piece: offsets
    in the slots, and bytes.
    """

    source_bytes: int
    target_bytes: int
    source: U64Array
    target: U64Array
    length: U64Array

    @staticmethod
    def whole(slot_bytes: int) -> SlotMap:
        """Of a pool to itself: the slot as it is, padding and all."""
        zero = np.zeros(1, np.uint64)
        return SlotMap(slot_bytes, slot_bytes, zero, zero, np.array([slot_bytes], np.uint64))

    @staticmethod
    def between(source: PoolSpec, target: PoolSpec) -> SlotMap:
        """Raises InvalidRequestError, with the reason, when they are not of one family."""
        if why := target.why_not_family(source):
            raise InvalidRequestError(f"pool: {why}")
        # Specs are equal whatever their heads are, so that these have to be in the cache's key.
        cuts = tuple((p.heads, p.head_runs) if p.is_splittable else None for p in source.planes)
        return _between(source, target, cuts)

    def ranges(self, first: int, count: int) -> tuple[U64Array, U64Array]:
        """What to read of `count` blocks from the `first` of an offer on: [count * n, 3] uint64 block, offset
        in it and length, and per range its offset in the slot of its block."""
        ranges = np.empty((count, len(self.source), 3), np.uint64)
        ranges[..., 0] = np.arange(first, first + count, dtype=np.uint64)[:, None]
        ranges[..., 1] = self.source
        ranges[..., 2] = self.length
        return ranges.reshape(-1, 3), np.tile(self.target, count)

    def target_runs(self) -> tuple[U64Array, U64Array]:
        """Offset and length of what the pieces fill in the target, neighbours as one."""
        pieces = np.stack([self.target, self.target, self.length], axis=1).astype(np.int64)
        runs = _merged(pieces).astype(np.uint64)
        return runs[:, 1], runs[:, 2]


@lru_cache(maxsize=16)
def _between(source: PoolSpec, target: PoolSpec, cuts: tuple[tuple[int, int] | None, ...]) -> SlotMap:
    """Of pools of one family. cuts: per plane its heads and head_runs, None where it is not split."""
    here, there = SlotLayout.of(source), SlotLayout.of(target)
    if source == target:
        return SlotMap.whole(here.slot_bytes)
    parts = []
    for at, cut in enumerate(cuts):
        mine, theirs = source.planes[at], target.planes[at]
        offsets = [np.array(each.layer_offsets[at], np.int64) for each in (here, there)]
        parts.append(_split(mine, theirs, *offsets) if cut else _same(mine, *offsets))
    pieces = _merged(np.concatenate(parts)).astype(np.uint64)
    return SlotMap(here.slot_bytes, there.slot_bytes, pieces[:, 0], pieces[:, 1], pieces[:, 2])


def _same(plane: Plane, source: I64Array, target: I64Array) -> I64Array:
    """[n, 3] int64: source, target, length of each layer of each shard. source, target: [shards, layers]
    int64, offsets of the layers."""
    length = np.broadcast_to(np.array(plane.layer_bytes, np.int64), source.shape)
    return np.stack([source, target, length], axis=-1).reshape(-1, 3)


def _split(mine: Plane, theirs: Plane, source: I64Array, target: I64Array) -> I64Array:
    """As _same(), of each run of each head, in the order of the target."""
    shards, layers = target.shape
    # The heads of each shard of the target, and where the source has them; of copies, the first one.
    heads = np.arange(shards)[:, None] * theirs.heads // shards + np.arange(theirs.shard_heads)
    shard = heads * mine.shards // mine.heads
    place = heads % mine.shard_heads
    runs = np.arange(mine.head_runs)[:, None]
    run_bytes = np.array(mine.run_bytes, np.int64)[:, None, None]
    # [shards, layers, head_runs, heads of a shard]
    shape = (shards, layers, mine.head_runs, theirs.shard_heads)
    pieces = np.empty((*shape, 3), np.int64)
    at = (runs * mine.shard_heads + place[:, None, None, :]) * run_bytes
    pieces[..., 0] = source[shard].transpose(0, 2, 1)[:, :, None, :] + at
    at = (runs * theirs.shard_heads + np.arange(theirs.shard_heads)) * run_bytes
    pieces[..., 1] = target[:, :, None, None] + at
    pieces[..., 2] = run_bytes
    return pieces.reshape(-1, 3)


def _merged(pieces: I64Array) -> I64Array:
    """What lies end to end on both sides is one piece."""
    source, target, length = pieces.T
    first = np.ones(len(pieces), np.bool_)
    first[1:] = (source[1:] != (source + length)[:-1]) | (target[1:] != (target + length)[:-1])
    at = np.flatnonzero(first)
    return np.stack([source[at], target[at], np.add.reduceat(length, at)], axis=1)
