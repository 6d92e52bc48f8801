"""Requests of any length, checked and cut into messages of the store's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.client.handles import SealEntry, SlotRef
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import KEY_BYTES

T = TypeVar("T")

_NO_PARENT = bytes(KEY_BYTES)


def join_keys(keys: bytes | Sequence[bytes]) -> bytes:
    """Keys end to end. Raises InvalidRequestError when one is not 32 bytes."""
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            raise InvalidRequestError(f"keys: {len(keys)} bytes given, a multiple of {KEY_BYTES} required")
        return keys
    for i, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise InvalidRequestError(f"keys[{i}]: {len(key)} bytes given, {KEY_BYTES} required")
    return b"".join(keys)


def check_lease(hold: bool, lease: int) -> None:
    """Raises InvalidRequestError for a lease that a seal can't add to."""
    if lease and not hold:
        raise InvalidRequestError(f"lease: {lease} given without hold")
    if not 0 <= lease < 1 << 64:
        raise InvalidRequestError(f"lease: {lease} given, 0 to 2**64 - 1 allowed")


def check_entries(entries: Sequence[SealEntry]) -> None:
    """Raises InvalidRequestError when a key or a parent has not its length."""
    for i, (key, parent, _) in enumerate(entries):
        if len(key) != KEY_BYTES:
            raise InvalidRequestError(f"entries[{i}].key: {len(key)} bytes given, {KEY_BYTES} required")
        if parent and len(parent) != KEY_BYTES:
            raise InvalidRequestError(
                f"entries[{i}].parent: {len(parent)} bytes given, {KEY_BYTES} required, or none"
            )


def match_requests(session_id: bytes, keys: bytes, lease_ms: int, limit: int) -> Iterator[pb.MatchRequest]:
    """At most `limit` keys each."""
    for at in range(0, len(keys), limit * KEY_BYTES):
        yield pb.MatchRequest(
            session_id=session_id, keys=keys[at : at + limit * KEY_BYTES], lease_ms=lease_ms
        )


def seal_requests(
    session_id: bytes, entries: Sequence[SealEntry], lease_ms: int, lease_id: int, limit: int
) -> Iterator[pb.SealRequest]:
    """At most `limit` entries each."""
    for batch in _cut(entries, limit):
        yield _message(
            pb.SealRequest,
            session_id=session_id,
            keys=b"".join(entry.key for entry in batch),
            parents=b"".join(entry.parent or _NO_PARENT for entry in batch),
            slots=[entry.ref.slot for entry in batch],
            generations=[entry.ref.generation for entry in batch],
            lease_ms=lease_ms,
            lease_id=lease_id,
        )


def announce_requests(
    session_id: bytes, entries: Sequence[SealEntry], limit: int
) -> Iterator[pb.AnnounceRequest]:
    """At most `limit` entries each."""
    for batch in _cut(entries, limit):
        yield _message(
            pb.AnnounceRequest,
            session_id=session_id,
            keys=b"".join(entry.key for entry in batch),
            slots=[entry.ref.slot for entry in batch],
            generations=[entry.ref.generation for entry in batch],
        )


def release_requests(
    session_id: bytes, lease_ids: Sequence[int], refs: Sequence[SlotRef], limit: int
) -> Iterator[pb.ReleaseRequest]:
    """At most `limit` leases and `limit` slots each."""
    for leases, slots in zip_longest(_cut(lease_ids, limit), _cut(refs, limit), fillvalue=()):
        yield _message(
            pb.ReleaseRequest,
            session_id=session_id,
            lease_ids=leases,
            slots=[ref.slot for ref in slots],
            generations=[ref.generation for ref in slots],
        )


def heartbeats(leases: Sequence[int], limit: int) -> Iterator[pb.Heartbeat]:
    """At least one; at most `limit` leases each."""
    for batch in _cut(leases, limit) if leases else ((),):
        yield pb.Heartbeat(renew_leases=batch)


def _message(kind: type[T], **fields: Any) -> T:
    """Raises InvalidRequestError when a number does not fit its field."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{kind.__name__}: {error}") from None


def _cut(items: Sequence[T], limit: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), limit):
        yield items[at : at + limit]
