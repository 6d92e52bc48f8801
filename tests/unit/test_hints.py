"""Hints' keys and content: what is written is read, and no bytes do harm."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsieve_connector.sparse.hints import (
    HEADER,
    MAGIC,
    VERSION,
    hint_key,
    read_hint,
    rows_that_fit,
    write_hint,
)

BLOCK = 64


def test_the_key_is_its_own() -> None:
    key = hashlib.sha256(b"a block").digest()
    assert hint_key(key).hex() == "fb8125045b453f7ec8a356bc143c310d2d2afb0964583aadd1747b1b17714c27"
    assert len({key, hint_key(key), hint_key(hint_key(key)), hint_key(bytes(32))}) == 4


@given(data=st.data(), layers=st.integers(1, 5), count=st.integers(1, 9), slot_bytes=st.integers(60, 300))
def test_what_is_written_is_read(data: st.DataObject, layers: int, count: int, slot_bytes: int) -> None:
    """As much of it as fits the slot and the reader's hot buffer, and names tokens that the reader has."""
    rows = st.lists(st.integers(-1, 500), min_size=count, max_size=count)
    lists = data.draw(st.lists(rows, min_size=layers, max_size=layers))
    slot = np.full(slot_bytes, 0xAA, np.uint8)
    write_hint(slot, np.array(lists, np.int32), BLOCK)
    tokens, most = data.draw(st.integers(1, 600)), data.draw(st.integers(1, 9))
    kept = min(count, rows_that_fit(slot_bytes, layers))
    assert (slot[HEADER.size + 4 * layers * kept :] == 0xAA).all()
    found = read_hint(slot, layers, BLOCK, tokens, most)
    if not kept:
        assert found is None
        return
    assert found is not None
    assert found.dtype == np.int32
    assert found.flags.c_contiguous
    assert found.tolist() == [
        [row if row < tokens else -1 for row in layer[: min(kept, most)]] for layer in lists
    ]
    slot[:] = 0
    assert found.shape == (layers, min(kept, most)), "a copy"


def test_a_hint_is_for_one_shape() -> None:
    slot = np.zeros(4096, np.uint8)
    write_hint(slot, np.zeros((3, 8), np.int32), BLOCK)
    assert read_hint(slot, 3, BLOCK, 100, 8) is not None
    assert read_hint(slot, 2, BLOCK, 100, 8) is None
    assert read_hint(slot, 3, 2 * BLOCK, 100, 8) is None


headers = st.builds(
    HEADER.pack,
    st.sampled_from([MAGIC, b"kvs-hinu"]),
    st.sampled_from([VERSION, 0, 2]),
    st.sampled_from([BLOCK, 0]),
    st.one_of(st.integers(0, 4), st.just(2**32 - 1)),
    st.one_of(st.integers(0, 70), st.just(2**32 - 1)),
)


@given(header=st.one_of(st.binary(max_size=HEADER.size), headers), rest=st.binary(max_size=200))
@example(header=HEADER.pack(MAGIC, VERSION, BLOCK, 2, 2**32 - 1), rest=b"\xff" * 100)
@example(header=HEADER.pack(MAGIC, VERSION, BLOCK, 2, 12), rest=b"\xff\xff\xff\x7f" * 24)
def test_any_bytes_are_a_hint_or_none(header: bytes, rest: bytes) -> None:
    slot = np.frombuffer(header + rest, np.uint8)
    found = read_hint(slot, 2, BLOCK, 640, 16)
    if found is not None:
        assert header[:8] == MAGIC
        assert 4 * 2 * found.shape[1] <= len(rest)
        assert found.shape[1] <= 16
        assert ((found >= -1) & (found < 640)).all()


class Overwritten(np.ndarray[Any, Any]):
    """A slot that somebody else writes to once one has looked `looks` times at what it holds."""

    looks = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        plain = [arg.view(np.ndarray) if isinstance(arg, Overwritten) else arg for arg in args]
        found = getattr(ufunc, method)(*plain, **kwargs)
        Overwritten.looks -= 1
        if not Overwritten.looks:
            SLOT[HEADER.size :] = 0x7F
        return found


SLOT = np.zeros(4096, np.uint8)


@pytest.mark.parametrize("looks", [1, 2])
def test_a_slot_that_changes_while_it_is_read_names_no_other_rows(looks: int) -> None:
    write_hint(SLOT, np.full((3, 8), 5, np.int32), BLOCK)
    Overwritten.looks = looks
    found = read_hint(SLOT.view(Overwritten), 3, BLOCK, 640, 8)
    assert found is not None
    assert (found < 640).all()
    assert (SLOT[HEADER.size :] == 0x7F).all()


@pytest.mark.parametrize(
    ("slot_bytes", "layers", "rows"), [(0, 4, 0), (31, 1, 0), (36, 1, 1), (4096, 61, 16)]
)
def test_rows_that_fit(slot_bytes: int, layers: int, rows: int) -> None:
    assert rows_that_fit(slot_bytes, layers) == rows
