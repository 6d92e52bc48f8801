"""Hints: the positions of a request's hot rows, stored beside its blocks for whoever goes on from there.

A hint is a block like any other, reserved, sealed, matched, leased and evicted as one, under a key that
follows from that of the request's last full block. It is a child of that block, so that it goes first. It
only says what to fetch early: a missing or wrong one costs time, never an answer.

    slot = header | int32 [layers, count] positions, per layer the last used first, -1 for none; little-endian
    header = 8 bytes "kvs-hint" | u32 version | u32 block_tokens | u32 layers | u32 count | 8 bytes of 0
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

MAGIC, VERSION = b"kvs-hint", 1

HEADER = struct.Struct("<8sIIII8x")

Positions = npt.NDArray[np.int32]


def hint_key(key: bytes) -> bytes:
    """The key of the hint that belongs to the block `key`: 32 bytes, never a block's own."""
    return hashlib.sha256(b"kvsieve hot rows v1\0" + key).digest()


def rows_that_fit(slot_bytes: int, layers: int) -> int:
    """Most rows per layer of a hint in a slot."""
    return max(slot_bytes - HEADER.size, 0) // (4 * layers)


def write_hint(slot: npt.NDArray[np.uint8], positions: Positions, block_tokens: int) -> None:
    """positions: int32 [layers, H], the last used first; of those that do not fit the slot, the last ones are
    left out. A slot of at least HEADER.size bytes."""
    layers = len(positions)
    kept = positions[:, : rows_that_fit(len(slot), layers)].astype("<i4")
    header = HEADER.pack(MAGIC, VERSION, block_tokens, layers, kept.shape[1])
    slot[: HEADER.size] = np.frombuffer(header, np.uint8)
    slot[HEADER.size : HEADER.size + kept.nbytes] = kept.reshape(-1).view(np.uint8)


def read_hint(
    slot: npt.NDArray[np.uint8], layers: int, block_tokens: int, tokens: int, most: int
) -> Positions | None:
    """int32 [layers, <= most]: a copy of the first `most` positions of each layer, -1 for those that are not
    among the first `tokens`. None when the slot holds no hint of this shape; its bytes may be anything, and
    change while they are read: the slot of a lease that is gone may be another's."""
    if len(slot) < HEADER.size:
        return None
    magic, version, its_block_tokens, its_layers, count = HEADER.unpack(slot[: HEADER.size].tobytes())
    if (magic, version, its_block_tokens, its_layers) != (MAGIC, VERSION, block_tokens, layers):
        return None
    if not 0 < count <= rows_that_fit(len(slot), layers):
        return None
    stored = slot[HEADER.size : HEADER.size + 4 * layers * count].view("<i4").reshape(layers, count)
    rows = stored[:, :most].copy()  # what is checked is what is returned
    return np.where((rows >= 0) & (rows < tokens), rows, -1).astype(np.int32, copy=False)
