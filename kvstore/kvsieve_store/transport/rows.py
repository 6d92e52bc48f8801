"""Rows of chosen layers as ranges: what a reader wants that does not want whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.transport.memory import U64Array


def row_ranges(
    spec: PoolSpec,
    plane: str,
    layers: Sequence[int],
    blocks: ArrayLike,
    rows: ArrayLike,
    row_bytes: int,
    *,
    shard: int = 0,
) -> U64Array:
    """Ranges for Link.read(): [len(layers) * k, 3] uint64, all rows of the first layer, then the next one's.

    blocks, rows: [k] int, which block of the export and which row of its part of a layer. row_bytes: size of
    a row, as it lies in the plane.
    Raises InvalidRequestError for a plane, layer, shard or row that the spec has not got.
    """
    names = [each.name for each in spec.planes]
    if plane not in names:
        raise InvalidRequestError(f"plane: {plane!r} given, the pool has {', '.join(names)}")
    at = names.index(plane)
    found = spec.planes[at]
    if not 0 <= shard < found.shards:
        raise InvalidRequestError(f"shard: {shard} given, 0 to {found.shards - 1} allowed")
    block, row = np.broadcast_arrays(np.asarray(blocks, np.int64), np.asarray(rows, np.int64))
    offsets = SlotLayout.of(spec).layer_offsets[at][shard]
    ranges = np.empty((len(layers), len(block), 3), np.uint64)
    for i, layer in enumerate(layers):
        if not 0 <= layer < len(offsets):
            raise InvalidRequestError(f"layers[{i}]: {layer} given, 0 to {len(offsets) - 1} allowed")
        most = found.layer_bytes[layer] // row_bytes if row_bytes > 0 else 0
        bad = np.flatnonzero((row < 0) | (row >= most) | (block < 0))
        if len(bad):
            raise InvalidRequestError(
                f"rows[{bad[0]}]: row {row[bad[0]]} of block {block[bad[0]]} given; "
                f"layer {layer} has {most} rows of {row_bytes} bytes"
            )
        ranges[i, :, 0], ranges[i, :, 1], ranges[i, :, 2] = block, offsets[layer] + row * row_bytes, row_bytes
    return ranges.reshape(-1, 3)
