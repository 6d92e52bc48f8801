"""Requests of any length, checked and cut into messages of the store's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.client.checks import UINT32, UINT64, check_key, check_whole
from kvsieve_store.client.handles import SealEntry, SlotRef
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import KEY_BYTES

T = TypeVar("T")

_NO_PARENT = bytes(KEY_BYTES)


def check_lease(hold: bool, lease: int) -> None:
    """Raises InvalidRequestError for a lease that a seal can't add to; 0: none."""
    check_whole("lease", lease, 0, UINT64)
    if lease and not hold:
        raise InvalidRequestError(f"lease: {lease} given without hold")


def check_entries(entries: Sequence[SealEntry]) -> None:
    """Raises InvalidRequestError, which names the entry."""
    _check_sequence("entries", entries, "SealEntry")
    for i, entry in enumerate(entries):
        if not isinstance(entry, SealEntry):
            raise InvalidRequestError(f"entries[{i}]: {type(entry).__name__} given, a SealEntry required")
        key, parent, ref = entry
        if _is_key(key) and (_is_key(parent) or parent == b"") and _is_ref(ref):
            continue
        check_key(f"entries[{i}].key", key)
        check_key(f"entries[{i}].parent", parent, or_none=True)
        _check_ref(f"entries[{i}].ref", ref)


def check_release(lease_ids: Sequence[int], refs: Sequence[SlotRef]) -> None:
    """Raises InvalidRequestError, which names the lease or the slot."""
    _check_sequence("lease_ids", lease_ids, "lease ids")
    for i, lease in enumerate(lease_ids):
        check_whole(f"lease_ids[{i}]", lease, 1, UINT64)
    _check_sequence("refs", refs, "SlotRef")
    for i, ref in enumerate(refs):
        if not _is_ref(ref):
            _check_ref(f"refs[{i}]", ref)


# The quick answers for nearly all.


def _is_key(key: object) -> bool:
    return type(key) is bytes and len(key) == KEY_BYTES


def _is_ref(ref: object) -> bool:
    return (
        type(ref) is SlotRef
        and type(ref.slot) is int is type(ref.generation)
        and 0 <= ref.slot <= UINT32
        and 0 <= ref.generation <= UINT32
    )


def _check_ref(field: str, ref: object) -> None:
    if not isinstance(ref, SlotRef):
        raise InvalidRequestError(f"{field}: {type(ref).__name__} given, a SlotRef required")
    check_whole(f"{field}.slot", ref.slot, 0, UINT32)
    check_whole(f"{field}.generation", ref.generation, 0, UINT32)


def _check_sequence(field: str, items: Any, of: str) -> None:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise InvalidRequestError(f"{field}: {type(items).__name__} given, a sequence of {of} required")


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
    session_id: bytes, entries: Sequence[SealEntry], hold_ms: int, limit: int
) -> Iterator[pb.AnnounceRequest]:
    """At most `limit` entries each."""
    for batch in _cut(entries, limit):
        yield _message(
            pb.AnnounceRequest,
            session_id=session_id,
            keys=b"".join(entry.key for entry in batch),
            slots=[entry.ref.slot for entry in batch],
            generations=[entry.ref.generation for entry in batch],
            hold_ms=hold_ms,
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
