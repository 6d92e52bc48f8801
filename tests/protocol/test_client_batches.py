"""Requests of any length are cut into messages that say the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.client import SealEntry, SlotRef
from kvsieve_store.client.batches import heartbeats, match_requests, release_requests, seal_requests

SESSION = bytes(16)
limits = st.integers(1, 7)
words = st.integers(0, 2**32 - 1)
keys = st.binary(min_size=32, max_size=32)
refs = st.builds(SlotRef, words, words)
sealed = st.lists(st.builds(SealEntry, keys, st.one_of(st.just(b""), keys), refs), max_size=30)


@given(st.lists(keys, max_size=30), limits)
def test_match(asked: list[bytes], limit: int) -> None:
    requests = list(match_requests(SESSION, b"".join(asked), 5, limit))
    assert b"".join(request.keys for request in requests) == b"".join(asked)
    assert all(0 < len(request.keys) <= limit * 32 for request in requests)


@given(sealed, limits)
def test_seal(entries: list[SealEntry], limit: int) -> None:
    requests = list(seal_requests(SESSION, entries, 7, 9, limit))
    assert all((request.lease_ms, request.lease_id) == (7, 9) for request in requests)
    assert all(0 < len(request.slots) <= limit for request in requests)
    assert b"".join(request.keys for request in requests) == b"".join(e.key for e in entries)
    assert b"".join(request.parents for request in requests) == b"".join(
        e.parent or bytes(32) for e in entries
    )
    sent = [SlotRef(*ref) for r in requests for ref in zip(r.slots, r.generations, strict=True)]
    assert sent == [e.ref for e in entries]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), st.lists(refs, max_size=30), limits)
def test_release(leases: list[int], slots: list[SlotRef], limit: int) -> None:
    requests = list(release_requests(SESSION, leases, slots, limit))
    assert all(0 < max(len(r.lease_ids), len(r.slots)) <= limit for r in requests)
    assert [lease for r in requests for lease in r.lease_ids] == leases
    sent = [SlotRef(*ref) for r in requests for ref in zip(r.slots, r.generations, strict=True)]
    assert sent == slots


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), limits)
def test_heartbeats(leases: list[int], limit: int) -> None:
    beats = list(heartbeats(leases, limit))
    assert beats
    assert all(len(beat.renew_leases) <= limit for beat in beats)
    assert [lease for beat in beats for lease in beat.renew_leases] == leases
