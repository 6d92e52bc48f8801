"""Array types of the state machine, and the one place where raw keys become arrays."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import KEY_BYTES

U8Array: TypeAlias = npt.NDArray[np.uint8]
U16Array: TypeAlias = npt.NDArray[np.uint16]
U32Array: TypeAlias = npt.NDArray[np.uint32]
I32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

SlotArray: TypeAlias = npt.NDArray[np.intp]
"""Slot numbers, ready to index with."""

KeyArray: TypeAlias = npt.NDArray[np.uint64]
"""Keys as four 8-byte words each, [n, 4] uint64."""


def as_keys(field: str, keys: bytes, low: int, high: int) -> KeyArray:
    """`keys` end to end, 32 bytes each, as [n, 4] uint64 without a copy.

    Raises InvalidRequestError, which names `field`, unless they are `low` to `high` whole keys.
    """
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest:
        raise InvalidRequestError(f"{field}: {len(keys)} bytes given, a multiple of {KEY_BYTES} required")
    if not low <= count <= high:
        raise InvalidRequestError(f"{field}: {count} keys given, {low} to {high} allowed")
    return np.frombuffer(keys, dtype=np.uint64).reshape(count, 4)


def each_once(slots: SlotArray) -> I32Array:
    """The slots in ascending order without repetition. Faster than np.unique() for a thousand."""
    ordered: I32Array = np.sort(slots.astype(np.int32))
    again = ordered[1:] == ordered[:-1]
    return ordered[np.flatnonzero(np.append(True, ~again))] if again.any() else ordered


def as_slots(slots: U32Array) -> SlotArray:
    """Slot numbers off the wire as an index array."""
    return slots.astype(np.intp)
