"""The reference of swap_in: the bodies that the kernel must pass too, random sizes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvsieve_connector.kernels import swap_in_reference  # noqa: E402
from tests.unit.swap_in_bodies import BODIES  # noqa: E402
from tests.unit.swap_in_trace import Face, Size, Trace  # noqa: E402

REFERENCE = Face(swap_in_reference, "cpu")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_reference(body: Callable[[Face], None]) -> None:
    body(REFERENCE)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    draw = data.draw
    query_tokens = draw(st.sampled_from([1, 3]))
    hot_blocks = draw(st.integers(1, 3))
    size = Size(
        batch=draw(st.integers(1, 3)),
        slots=3,
        blocks=draw(st.integers(2, 5)),
        k=draw(st.integers(1, hot_blocks * 64 // query_tokens)),
        hot_blocks=hot_blocks,
        query_tokens=query_tokens,
        row_bytes=draw(st.sampled_from([656, 1152, 16])),
        groups=draw(st.integers(1, 2)),
    )
    trace = Trace(REFERENCE, size, draw(st.integers(0, 1000)))
    for _ in range(6):
        trace.change()
        trace.step(fresh=draw(st.sampled_from([0.1, 0.5, 1.0])))


@pytest.fixture
def trace() -> Trace:
    trace = Trace(REFERENCE, Size(batch=2, slots=2, blocks=2, k=32, hot_blocks=1), 0)
    trace.start(0, 2)
    return trace


def call(trace: Trace, **changes: object) -> None:
    args = {
        "layer": trace.layer,
        "tables": trace.tables,
        "topk": torch.zeros(2, 32, dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "out": torch.zeros(2, 32, dtype=torch.int32),
        "counts": None,
        "query_tokens": 1,
        "stride_rows": 128,
    }
    swap_in_reference.swap_in(**(args | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": torch.zeros(2, 32)}, r"topk must be torch.int32 \[\*, \*\], got torch.float32 \[2, 32\]"),
        ({"out": torch.zeros(2, 31, dtype=torch.int32)}, r"out must be torch.int32 \[2, 32\]"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, r"counts must be torch.int32 \[2\]"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int32)}, r"block_table must be int32 \[>= 2"),
        ({"query_tokens": 3}, "topk has 2 rows, not a multiple of query_tokens 3"),
        (
            {"topk": torch.zeros(2, 65, dtype=torch.int32), "out": torch.zeros(2, 65, dtype=torch.int32)},
            "the hot buffer has 64 rows, fewer than query_tokens \\* k = 65",
        ),
        (
            {"topk": torch.zeros(3, 32, dtype=torch.int32), "out": torch.zeros(3, 32, dtype=torch.int32)},
            "3 batch rows, but row_slot has 2",
        ),
    ],
)
def test_bad_arguments_are_named(trace: Trace, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(trace, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_offset": 8}, "16-byte aligned, got row_bytes 656, block stride 83968, layer_offset 8"),
        ({"group": 2}, "group must be 0..1, got 2"),
        ({"tag": torch.zeros(2, 63, dtype=torch.int32)}, r"tag must be torch.int32 \[2, 64\]"),
        ({"slot_of": torch.zeros(7, dtype=torch.int16)}, r"slot_of must be torch.int16 \[320\]"),
    ],
)
def test_bad_layers_are_named(trace: Trace, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(trace, layer=replace(trace.layer, **changes))


def test_a_hot_row_is_passed_over_once() -> None:
    """What was used since the hand last came by outlives what was not."""
    trace = Trace(REFERENCE, Size(batch=1, slots=1, blocks=4, k=32, hot_blocks=1), seed=3)
    trace.start(0, 4)
    for b in range(4):
        trace.lose(0, b)

    def misses(first: int, count: int = 32) -> int:
        """Of one call that asks for `count` positions from `first` on."""
        before = trace.counter("missed_rows")
        row = np.full((1, 32), -1, np.int32)
        row[0, :count] = np.arange(first, first + count)
        trace.swap_in([0], {0: row})
        return trace.counter("missed_rows") - before

    assert [misses(0), misses(32)] == [32, 32]
    assert misses(64) == 32  # the hand goes round, takes every chance, and then slots of 0..31
    assert misses(32, 16) == 0  # used since
    assert misses(96, 16) == 16  # the hand passes over them once, and takes 48..63
    assert misses(32, 16) == 0
    assert misses(48, 16) == 16
