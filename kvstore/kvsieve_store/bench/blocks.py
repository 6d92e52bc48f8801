"""Pools and blocks that only benchmarks use."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvsieve_store.client import SealEntry, SlotRef
from kvsieve_store.protocol.limits import KEY_BYTES
from kvsieve_store.protocol.spec import Plane, PoolSpec

SMALL_SLOT = 4096
"""Bytes of the smallest slot: benchmarks of bookkeeping don't touch payload."""


def pool(name: str, layer_bytes: Sequence[int] = (SMALL_SLOT,)) -> PoolSpec:
    """A pool of blocks with these layers, bytes each, under a name that no engine uses."""
    planes = (Plane("main", tuple(layer_bytes)),)
    return PoolSpec(f"kvsieve-bench/{name}", "bench", "bfloat16", 16, "sha256", "0", "bench/v1", 1, planes)


def random_keys(count: int) -> list[bytes]:
    """Keys that nobody else has; as random as SHA-256."""
    raw = os.urandom(count * KEY_BYTES)
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def chain(keys: Sequence[bytes], refs: Sequence[SlotRef], parent: bytes = b"") -> list[SealEntry]:
    """Entries that make `keys` a chain of prefixes, the first one after `parent`."""
    return list(map(SealEntry, keys, [parent, *keys[:-1]], refs))
