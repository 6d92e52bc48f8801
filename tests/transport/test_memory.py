"""No range, whatever its numbers, reaches past a buffer or a block."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.errors import CapacityError, InvalidRequestError, NotFoundError
from kvsieve_store.transport import base, wire
from kvsieve_store.transport.exports import Export, Exports
from kvsieve_store.transport.memory import Memory

SIZES = (100, 1, 64)
near = st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1), st.integers(2**64 - 200, 2**64 - 1))


def memory() -> Memory:
    return Memory([np.arange(size, dtype=np.uint8) for size in SIZES])


def inside(offset: int, length: int) -> bool:
    starts = (0, 100, 101)
    return (
        any(s <= offset and offset + length <= s + n for s, n in zip(starts, SIZES, strict=True))
        and length > 0
    )


@given(st.lists(st.tuples(near, near), min_size=1, max_size=5))
def test_a_range_is_inside_a_buffer_or_refused(asked: list[tuple[int, int]]) -> None:
    place = memory()
    offsets, lengths = (np.array(column, np.uint64) for column in zip(*asked, strict=True))
    if not all(inside(*each) for each in asked):
        for call in (place.slices, place.addresses, place.pieces):
            with pytest.raises(InvalidRequestError, match="range"):
                call(offsets, lengths)
        return
    flat = b"".join(bytes(view) for view in place.views)
    views = place.slices(offsets, lengths)
    assert [bytes(view) for view in views] == [flat[o : o + n] for o, n in asked]
    starts = [np.frombuffer(view, np.uint8).ctypes.data for view in views]
    assert starts == place.addresses(offsets, lengths).tolist()
    # Pieces are the same bytes, with no two of them end to end in one buffer.
    pieces = [tuple(each) for each in place.pieces(offsets, lengths).tolist()]
    assert [at + i for at, n in pieces for i in range(n)] == [
        at + i for at, view in zip(starts, views, strict=True) for i in range(len(view))
    ]
    inner = {base + size for base, size in zip(place.bases.tolist(), SIZES, strict=True)}
    assert all(a + n != b or b in inner for (a, n), (b, _) in pairwise(pieces))


def test_no_ranges_are_no_pieces() -> None:
    nothing = np.zeros(0, np.uint64)
    assert memory().pieces(nothing, nothing).shape == (0, 2)


@given(st.lists(st.tuples(near, near, near), min_size=1, max_size=5))
def test_a_range_is_inside_its_block_or_refused(asked: list[tuple[int, int, int]]) -> None:
    export = Export(np.array([5, 50], np.uint64), 40)
    ranges = np.array(asked, np.uint64)
    if not all(block < 2 and length > 0 and at + length <= 40 for block, at, length in asked):
        with pytest.raises(InvalidRequestError, match="ranges"):
            export.ranges(ranges)
        return
    offsets, lengths = export.ranges(ranges)
    assert offsets.tolist() == [(5, 50)[block] + at for block, at, _ in asked]
    assert lengths.tolist() == [length for *_, length in asked]


def test_a_request_for_too_many_bytes_is_refused() -> None:
    export = Export(np.array([0], np.uint64), 1 << 40)
    with pytest.raises(InvalidRequestError, match="at most"):
        export.ranges(np.array([[0, 0, wire.MAX_READ_BYTES], [0, 0, 1]], np.uint64))


@given(
    st.lists(st.integers(1, 50), min_size=0, max_size=60),
    st.integers(1, 40),
)
def test_chunks_are_the_same_bytes_in_order(lengths: list[int], most: int) -> None:
    place = Memory([np.zeros(4000, np.uint8)])
    ranges = np.array([[i, 10 * i, n] for i, n in enumerate(lengths)], np.uint64).reshape(-1, 3)
    into = np.cumsum([0, *lengths[:-1]], dtype=np.uint64) if lengths else np.zeros(0, np.uint64)
    parts = list(base.chunks(place, ranges, into, most))
    asked = [
        (int(block), int(at) + i, int(to) + i)
        for part, places in parts
        for (block, at, n), to in zip(part, places, strict=True)
        for i in range(int(n))
    ]
    assert asked == [(b, 10 * b + i, int(into[b]) + i) for b, n in enumerate(lengths) for i in range(n)]
    assert all(int(part[:, 2].sum()) <= most and len(part) <= wire.MAX_RANGES for part, _ in parts)


def test_many_small_ranges_are_several_requests() -> None:
    place = Memory([np.zeros(3000, np.uint8)])
    ranges = np.array([[0, 0, 1]] * 2500, np.uint64)
    assert [len(part) for part, _ in base.chunks(place, ranges, np.arange(2500, dtype=np.uint64))] == [
        1024,
        1024,
        452,
    ]


def test_nothing_is_read_into_what_is_no_memory() -> None:
    place = memory()
    with pytest.raises(InvalidRequestError, match="range 1"):
        base.chunks(place, np.array([[0, 0, 10], [0, 0, 10]], np.uint64), np.array([0, 95], np.uint64))
    with pytest.raises(InvalidRequestError, match="into"):
        base.chunks(place, np.array([[0, 0, 10]], np.uint64), np.array([0, 5], np.uint64))


class TestExports:
    def test_blocks_must_be_inside_the_memory(self) -> None:
        exports = Exports(memory())
        with pytest.raises(InvalidRequestError):
            exports.open(np.array([0, 90], np.uint64), 20)
        with pytest.raises(InvalidRequestError, match="blocks"):
            exports.open(np.zeros(0, np.uint64), 20)
        assert len(exports) == 0

    def test_there_is_a_limit(self) -> None:
        exports = Exports(memory(), limit=1)
        exports.open(np.array([0], np.uint64), 20)
        with pytest.raises(CapacityError, match="1 are open"):
            exports.open(np.array([0], np.uint64), 20)

    def test_it_is_drained_when_closed_and_no_answer_is_on_its_way(self) -> None:
        exports, drained = Exports(memory()), []
        token = exports.open(np.array([0], np.uint64), 20)
        first, second = exports.begin(token), exports.begin(token)
        exports.close(token, lambda: drained.append(1))
        with pytest.raises(NotFoundError):
            exports.begin(token)
        exports.end(first)
        assert not drained
        exports.end(second)
        assert drained == [1]
        exports.close(token, lambda: drained.append(2))
        assert drained == [1, 2]
