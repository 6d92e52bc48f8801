"""Checks of arguments that many calls have in common."""

from __future__ import annotations

import numpy as np

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import MAX_BATCH
from kvsieve_store.state.arrays import KeyArray, as_keys


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises InvalidRequestError."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{field}: {value} given, {low} to {high} allowed")


def check_length(field: str, given: int, other: str, required: int) -> None:
    """Raises InvalidRequestError."""
    if given != required:
        raise InvalidRequestError(f"{field}: {given} entries given, {required} required as in {other}")


def block_keys(keys: bytes) -> KeyArray:
    """Keys of blocks that are about to be there, a batch at most. Raises InvalidRequestError."""
    found = as_keys("keys", keys, 1, MAX_BATCH)
    empty = np.flatnonzero(~found.any(axis=1))
    if len(empty):
        raise InvalidRequestError(f"keys[{empty[0]}]: all zero, which stands for no block")
    return found
