"""Where every byte lies: slots in extents, planes, shards and layers in slots, words in headers.

    arena   = segments (files), one after another
    segment = extents of equal size
    extent  = [header 0 .. header n-1][pad to 4 KiB][slot 0]..[slot n-1], all of one pool
    slot    = for each plane, for each shard: its layers, one after another; padded to 4 KiB
    header  = 128 bytes: u64 generation | 56 bytes reserved | 32 x u16 layers_done, one per shard

The generation in the header goes up before a slot is granted again. A reader that copies a leased block
compares it before and after the copy: equal means that the bytes are the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.spec import Plane, PoolSpec

SLOT_ALIGN = 4096
SHARD_ALIGN = 256
HEADER_BYTES = 128
HEADER_GENERATION = 0
HEADER_LAYERS_DONE = 64
MAX_WRITERS = 32

STORE_LOCK = "store.lock"
"""File beside the segments, on which the store holds an exclusive flock(2) for as long as it lives."""


def align(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Offsets inside a slot, bytes.

    layer_offsets[plane][shard][layer] -> offset from the slot's base.
    """

    slot_bytes: int
    layer_offsets: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(spec: PoolSpec) -> SlotLayout:
        return SlotLayout.of_planes(spec.planes)

    @staticmethod
    def of_planes(spec_planes: Sequence[Plane]) -> SlotLayout:
        at = 0
        planes = []
        for plane in spec_planes:
            shards = []
            for _ in range(plane.shards):
                at = align(at, SHARD_ALIGN)
                layers = []
                for size in plane.layer_bytes:
                    layers.append(at)
                    at += size
                shards.append(tuple(layers))
            planes.append(tuple(shards))
        return SlotLayout(align(at, SLOT_ALIGN), tuple(planes))


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Offsets inside an extent, bytes. Slot number s of a pool lies in extent s // slots_per_extent."""

    extent_bytes: int
    slot_bytes: int
    slots_per_extent: int
    slots_offset: int

    @staticmethod
    def of(extent_bytes: int, slot_bytes: int) -> ExtentLayout:
        """Raises CapacityError when not even one slot fits."""
        n = extent_bytes // (slot_bytes + HEADER_BYTES)
        while n and align(n * HEADER_BYTES, SLOT_ALIGN) + n * slot_bytes > extent_bytes:
            n -= 1
        if n == 0:
            raise CapacityError(
                f"pool.planes: a slot of {slot_bytes} bytes does not fit an extent of {extent_bytes} bytes; "
                "start the store with a larger --extent-size"
            )
        return ExtentLayout(extent_bytes, slot_bytes, n, align(n * HEADER_BYTES, SLOT_ALIGN))

    def slot_address(self, slot: int) -> int:
        """Offset of a slot from the start of the arena, extents laid end to end."""
        extent, i = divmod(slot, self.slots_per_extent)
        return extent * self.extent_bytes + self.slots_offset + i * self.slot_bytes

    def slot_addresses(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """slot_address() of each, [n] uint64."""
        extent, i = np.divmod(slots.astype(np.int64), self.slots_per_extent)
        found = extent * self.extent_bytes + self.slots_offset + i * self.slot_bytes
        addresses: npt.NDArray[np.uint64] = found.astype(np.uint64)
        return addresses

    def header_address(self, slot: int) -> int:
        """Offset of a slot's header from the start of the arena."""
        extent, i = divmod(slot, self.slots_per_extent)
        return extent * self.extent_bytes + i * HEADER_BYTES
