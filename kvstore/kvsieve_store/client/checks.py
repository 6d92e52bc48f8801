"""What callers give to the client, checked before anything is sent. Each raises InvalidRequestError, which
names the field, what was given, and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH

UINT32 = (1 << 32) - 1
UINT64 = (1 << 64) - 1

MAX_TIMEOUT = 86_400.0
"""Seconds, of a call."""

MAX_TEXT = 256
"""Characters of an engine's id, or a store's address."""

MAX_SECONDS = 600.0
"""Of a pull, a hold, a lease: what the store takes."""


def check_seconds(field: str, value: Any, most: float = math.inf, *, zero: bool = False) -> None:
    """A finite number, more than 0 (or 0, where `zero`), at most `most` as whole milliseconds."""
    limit = f"{'0 or more' if zero else 'more than 0'}{'' if most == math.inf else f', at most {most:g},'}"
    if isinstance(value, bool) or not _is(value, Real):
        raise InvalidRequestError(f"{field}: {value!r} given, a number of seconds required, {limit}")
    in_range = value >= 0 if zero else value > 0
    if not in_range or value == math.inf or (value > most and int(value * 1000) > most * 1000):
        raise InvalidRequestError(f"{field}: {value} given, {limit} seconds required")


def check_whole(field: str, value: Any, least: int, most: int) -> None:
    """A whole number."""
    if isinstance(value, bool) or not _is(value, Integral):
        raise InvalidRequestError(f"{field}: {value!r} given, a whole number required, {least} to {most}")
    if not least <= value <= most:
        raise InvalidRequestError(f"{field}: {value} given, {least} to {most} allowed")


def check_text(field: str, value: object, most: int) -> None:
    """At most so many characters, which UTF-8 has."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field}: {value!r} given, a text required")
    if len(value) > most:
        raise InvalidRequestError(f"{field}: {len(value)} characters given, at most {most} allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field}: {error}") from None


def join_keys(keys: bytes | Sequence[bytes]) -> bytes:
    """Keys end to end; each has to be 32 bytes."""
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            raise InvalidRequestError(f"keys: {len(keys)} bytes given, a multiple of {KEY_BYTES} required")
        return keys
    given: Any = keys
    if isinstance(given, str | bytearray | memoryview) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"keys: {type(keys).__name__} given, bytes or a sequence of them required")
    for i, key in enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_BYTES:
            check_key(f"keys[{i}]", key)
    return b"".join(keys)


def join_chain(keys: bytes | Sequence[bytes], most: int = MAX_BATCH) -> bytes:
    """The same for a call that is not split: 1 to `most` keys."""
    joined = join_keys(keys)
    if not 1 <= len(joined) // KEY_BYTES <= most:
        raise InvalidRequestError(f"keys: {len(joined) // KEY_BYTES} given, 1 to {most} allowed")
    return joined


def check_key(field: str, key: object, *, or_none: bool = False) -> None:
    """32 bytes; with `or_none` also b""."""
    also = ", or none" if or_none else ""
    if not isinstance(key, bytes):
        raise InvalidRequestError(f"{field}: {type(key).__name__} given, {KEY_BYTES} bytes required{also}")
    if len(key) != KEY_BYTES and not (or_none and not key):
        raise InvalidRequestError(f"{field}: {len(key)} bytes given, {KEY_BYTES} required{also}")


def _is(value: Any, kind: type) -> bool:
    """isinstance() of Python's and numpy's numbers, of which mypy does not know that they compare."""
    return isinstance(value, kind)
