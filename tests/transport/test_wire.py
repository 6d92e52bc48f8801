"""The frames: what is packed comes back, and what is no frame gets an error, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    KVSieveError,
    LinkError,
    NotFoundError,
)
from kvsieve_store.transport import wire
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.wire import Head, Kind, Request, Status

words = st.integers(0, 2**64 - 1)
heads = st.builds(Head, st.sampled_from(Kind), st.sampled_from(Status), words, words)
ranges = st.lists(st.tuples(words, words, words), min_size=1, max_size=40).map(
    lambda r: np.array(r, np.uint64)
)
tokens = st.binary(min_size=16, max_size=16)


@given(heads)
def test_a_head_comes_back(head: Head) -> None:
    assert Head.of(head.pack()) == head
    assert len(head.pack()) == wire.HEAD_BYTES


@given(st.binary(max_size=64))
def test_what_is_no_head_gets_an_error(raw: bytes) -> None:
    try:
        head = Head.of(raw)
    except InvalidRequestError:
        return
    assert head.pack() == raw


@given(st.binary(min_size=20, max_size=20), st.integers(0, 19), st.integers(0, 255))
def test_a_head_with_the_right_magic_is_read_or_refused(rest: bytes, at: int, value: int) -> None:
    raw = bytearray(wire.MAGIC.to_bytes(4, "little") + rest)
    raw[4 + at] = value
    try:
        head = Head.of(raw)
    except InvalidRequestError:
        return
    assert head.pack() == raw


@given(tokens, ranges)
def test_a_request_comes_back(token: bytes, asked: np.ndarray) -> None:
    body = Request(Kind.READ, token, asked).body()
    request = Request.of(Head(Kind.READ, Status.OK, 1, len(body)), body)
    assert request.token == token
    assert (request.ranges == asked).all()


@given(heads, st.binary(max_size=200))
def test_a_request_is_read_or_refused(head: Head, body: bytes) -> None:
    try:
        request = Request.of(head, body)
    except InvalidRequestError:
        return
    assert request.body() == body
    assert (len(request.ranges) > 0) == (request.kind in (Kind.READ, Kind.LOCATE))


@pytest.mark.parametrize("count", [0, wire.MAX_RANGES + 1])
def test_a_read_has_ranges_up_to_the_limit(count: int) -> None:
    body = Request(Kind.READ, bytes(16), np.ones((count, 3), np.uint64)).body()
    with pytest.raises(InvalidRequestError):
        Request.of(Head(Kind.READ, Status.OK, 1, len(body)), body)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (InvalidRequestError("a: b"), InvalidRequestError),
        (NotFoundError("gone"), NotFoundError),
        (CapacityError("full"), CapacityError),
        (KVSieveError("bug"), LinkError),
    ],
)
def test_a_refusal_says_the_same_on_the_other_side(error: KVSieveError, raised: type[KVSieveError]) -> None:
    head, text = wire.refusal(Head(Kind.READ, Status.OK, 7, 40), error)
    assert (head.kind, head.id, head.size) == (Kind.READ, 7, len(text))
    assert type(wire.refused(head.status, text)) is raised
    assert str(error) in str(wire.refused(head.status, text))


@given(st.text(max_size=2000))
def test_a_long_refusal_is_cut(text: str) -> None:
    head, body = wire.refusal(Head(Kind.READ, Status.OK, 7, 40), KVSieveError(text))
    assert head.size == len(body) <= wire.MAX_TEXT_BYTES
    wire.refused(head.status, body)


@given(st.one_of(st.binary(max_size=100), st.text(max_size=100).map(str.encode)))
def test_what_is_no_description_gets_an_error(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        Description.of(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"tcp": 3}',
        b'{"tcp": "a:1", "segments": [{"path": "/x", "size": -1, "device": 1, "inode": 1}]}',
        b'{"tcp": "a:1", "ucx": {"worker": 3, "keys": [], "bases": [], "sizes": []}}',
        b'{"tcp": "' + b"a" * (1 << 20) + b'"}',
    ],
)
def test_a_description_is_checked(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="description"):
        Description.of(raw)


@pytest.mark.parametrize("address", ["unix:///run/a", "nonsense", "1.2.3.4:70000", "a.b:1"])
def test_the_address_of_a_description_is_checked(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="tcp"):
        _ = Description(tcp=address).address
