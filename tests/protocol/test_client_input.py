"""Bad input of every verb of the clients: an error that names field, value and limit, and nothing is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import grpc
import numpy as np
import pytest

from kvsieve_store.client import (
    AdminClient,
    AsyncStoreClient,
    Fetch,
    RemoteBlocks,
    SealEntry,
    SlotRef,
    StoreClient,
)
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.transport.memory import Memory
from tests.protocol.client_stores import SPEC, key, store_thread

SOURCE = "127.0.0.1:1"
ENTRY = SealEntry(key(1), b"", SlotRef(1, 1))

NO_NUMBERS = [None, "1", b"1", True, [1], 1j, Decimal(1)]
NO_SECONDS = [*NO_NUMBERS, -1, -0.001, math.nan, math.inf, -math.inf]
NO_TIME = [*NO_SECONDS, 0, 0.0]
TOO_LONG = [600.1, 601, 1e300, 10**400]
NO_COUNTS = [*NO_NUMBERS, 1.0, math.nan, -1, 1 << 32, 10**400]
NO_KEYS = [None, 1, "k" * 32, bytearray(32), memoryview(bytes(32)), {key(1)}, iter([key(1)]), b"x", bytes(33)]
NO_KEYS += [[bad] for bad in (None, 1, "k" * 32, bytearray(32), [key(1)], b"", bytes(31), bytes(33))]
NO_KEYS += [[key(1), key(2), bytes(31)], (key(1), "k")]
NO_CHAIN = [*NO_KEYS, b"", [], (), bytes(32 * 4097), [key(1)] * 4097]
NO_TEXT = [None, 1, b"a", ["a"], "\ud800", "x" * 5000]

NO_PARENT = [None, "k" * 32, 1, b"x", bytearray(32), [key(1)]]
NO_ENTRIES = [None, 1, "x", b"x", iter([ENTRY]), [None], [(key(1), b"")], [key(1)], [tuple(ENTRY)]]
NO_ENTRIES += [[ENTRY, ENTRY._replace(key=bad)] for bad in (None, "k" * 32, b"", bytearray(32))]
NO_ENTRIES += [[ENTRY, ENTRY._replace(parent=bad)] for bad in (None, "", b"x", bytearray(32))]
NO_REFS = [None, 1, (1, 1), SlotRef(-1, 1), SlotRef(1, 1 << 32), *(SlotRef(bad, 1) for bad in NO_NUMBERS)]
NO_ENTRIES += [[ENTRY._replace(ref=bad)] for bad in NO_REFS]
NO_LEASES = [None, 1, "12", b"12", {1}, iter([1]), *([1, bad] for bad in (*NO_NUMBERS, 0, -1, 1 << 64, 1.0))]
ONE = {"source": SOURCE, "keys": [key(1)]}

BAD: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("pull", ONE, "keys", NO_CHAIN),
    ("pull", ONE, "source", NO_TEXT),
    ("pull", ONE, "parent", NO_PARENT),
    ("pull", ONE, "seconds", NO_TIME + TOO_LONG),
    ("pull", ONE, "wait_seconds", NO_SECONDS + TOO_LONG),
    ("hold", {"seconds": 1}, "keys", NO_CHAIN),
    ("hold", {"keys": [key(1)]}, "seconds", NO_TIME + TOO_LONG),
    ("match", {}, "keys", NO_KEYS),
    ("seal", {}, "entries", NO_ENTRIES),
    ("seal", {"entries": [ENTRY], "hold": True}, "lease", [*NO_NUMBERS, 1.0, -1, 1 << 64]),
    ("seal", {"entries": [ENTRY]}, "lease", [1]),
    ("release", {}, "lease_ids", NO_LEASES),
    ("release", {}, "refs", [None, 1, "12", {SlotRef(1, 1)}, *([SlotRef(1, 1), bad] for bad in NO_REFS)]),
    ("reserve", {}, "count", [*NO_COUNTS, 0]),
    ("wait_attached", {}, "timeout", NO_SECONDS),
    ("take_credits", {}, "n", NO_COUNTS),
]
CASES = [
    pytest.param(verb, {**good, field: value}, field, id=f"{verb} {field} {n} {type(value).__name__}")
    for verb, good, field, values in BAD
    for n, value in enumerate(values)
]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with store_thread() as address:
        yield address


@pytest.fixture(scope="module")
def attached(endpoint: str) -> Iterator[StoreClient]:
    with StoreClient(endpoint, SPEC, engine_id="test", credit_target=4) as client:
        client.wait_attached(20)
        yield client


def says(error: BaseException, field: str, value: Any) -> None:
    """The message names the field, or a part of it, and what is given or how it is."""
    assert type(error) is InvalidRequestError
    assert re.match(rf"{re.escape(field)}(\[\d+\])?[.\w]*: .* ?(given|surrogates)", str(error)), error
    if isinstance(value, int | float):
        assert str(value) in str(error) or type(value).__name__ in str(error)


@pytest.mark.parametrize(("verb", "fields", "field"), CASES)
def test_verbs(attached: StoreClient, verb: str, fields: dict[str, Any], field: str) -> None:
    before, epoch = attached.credits, attached.wait_attached(0).epoch
    with pytest.raises(InvalidRequestError) as caught:
        getattr(attached, verb)(**fields)
    says(caught.value, field, fields[field])
    assert (attached.credits, attached.wait_attached(0).epoch) == (before, epoch)


@pytest.mark.parametrize(("verb", "fields", "field"), CASES)
async def test_the_asyncio_client_sends_nothing(verb: str, fields: dict[str, Any], field: str) -> None:
    """It has no session: what is sent would be UNAVAILABLE."""
    client = AsyncStoreClient("unix:///nowhere/s.sock", SPEC, engine_id="test")

    async def call() -> None:
        answer = getattr(client, verb)(**fields)
        if verb != "take_credits":
            await answer

    with pytest.raises(InvalidRequestError) as caught:
        await call()
    says(caught.value, field, fields[field])


@pytest.mark.parametrize("kind", [StoreClient, AsyncStoreClient])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("engine_id", NO_TEXT),
        ("credit_target", NO_COUNTS),
        ("lease_ms", [*NO_COUNTS, 1, 99]),
        ("timeout", [*NO_TIME, 86_401, 1e300]),
    ],
)
def test_options(kind: type, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            kind("unix:///nowhere/s.sock", SPEC, **{"engine_id": "test", field: value})
        says(caught.value, field, value)


def test_fetch() -> None:
    for value in NO_TIME + TOO_LONG:
        with pytest.raises(InvalidRequestError) as caught:
            Fetch(value)
        says(caught.value, "fetch.seconds", value)
    for value in [*NO_COUNTS, 0]:
        with pytest.raises(InvalidRequestError) as caught:
            Fetch(1.0, value)
        says(caught.value, "fetch.min_blocks", value)
    assert Fetch(600).min_blocks == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("keys", [*NO_KEYS, b"", [], bytes(32 * 32_769)]),
        ("seconds", NO_TIME + TOO_LONG),
        ("connect_seconds", NO_TIME + TOO_LONG),
    ],
)
def test_remote_blocks(field: str, values: list[Any]) -> None:
    good = {"source": SOURCE, "spec": SPEC, "keys": [key(1)], "memory": Memory([np.zeros(8, np.uint8)])}
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            RemoteBlocks(**{**good, field: value})
        says(caught.value, field, value)


def test_admin(endpoint: str) -> None:
    for value in [*NO_TIME, 86_401]:
        with pytest.raises(InvalidRequestError) as caught:
            AdminClient(endpoint, timeout=value)
        says(caught.value, "timeout", value)
    cases = [("list_blocks", "page_size", NO_COUNTS), ("list_blocks", "page_token", NO_TEXT)]
    cases += [("evict", "count", NO_COUNTS), ("evict", "keys", NO_KEYS)]
    cases += [("pin", "keys", NO_KEYS), ("unpin", "keys", NO_KEYS)]
    cases += [(verb, "pool", NO_TEXT) for verb in ("list_blocks", "evict", "pin", "unpin", "clear")]
    with AdminClient(endpoint) as admin:
        for verb, field, values in cases:
            for value in values:
                fields = {"pool": "p", **({"keys": [key(1)]} if verb == "pin" else {}), field: value}
                with pytest.raises(InvalidRequestError) as caught:
                    getattr(admin, verb)(**fields)
                says(caught.value, field, value)
                assert not isinstance(caught.value.__context__, grpc.RpcError), (verb, field, value)
        for value in NO_COUNTS:
            with pytest.raises(InvalidRequestError) as caught:
                admin.drain(timeout_ms=value)
            says(caught.value, "timeout_ms", value)


def test_what_is_just_allowed(attached: StoreClient) -> None:
    assert attached.hold([key(1)], seconds=600) == 0
    assert attached.hold(key(1) * 4096, seconds=np.float32(0.5)) == 0
    assert attached.hold((key(1),), seconds=600.0000001) == 0  # (now + 600) - now
    assert attached.match([]).refs == ()
    assert attached.seal([]) == []
    attached.release()
    assert attached.take_credits(0) == []
    attached.release(refs=attached.take_credits(int(np.uint32(1))))
    attached.release([np.uint64(2**64 - 1)])
