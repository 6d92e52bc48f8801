"""What swap_in and prefetch must do: run on the reference by test_swap_in.py, on the kernels by tests/gpu."""

from __future__ import annotations

import numpy as np

from tests.unit.swap_in_trace import NONE, Face, Size, Trace, run


def _host_request(trace: Trace, s: int) -> None:
    """A request with all its blocks on the host."""
    trace.start(s, trace.size.blocks)
    for b in range(trace.size.blocks):
        trace.lose(s, b)


def random_trace(face: Face) -> None:
    run(face, Size(batch=4, slots=5, blocks=6, k=96, hot_blocks=3), seed=1, steps=25)


def random_trace_of_bf16_rows(face: Face) -> None:
    run(face, Size(batch=3, slots=4, blocks=5, k=64, hot_blocks=2, row_bytes=1152), seed=2, steps=15)


def random_trace_of_three_query_tokens(face: Face) -> None:
    run(face, Size(batch=3, slots=4, blocks=8, k=64, hot_blocks=3, query_tokens=3), seed=3, steps=25)


def random_trace_with_prefetch(face: Face) -> None:
    run(face, Size(batch=3, slots=4, blocks=6, k=64, hot_blocks=2), seed=4, steps=20, prefetch=True)


def hot_buffer_of_exactly_k_rows(face: Face) -> None:
    """Each call replaces what it does not use itself: every slot that is not used is a victim."""
    trace = Trace(face, Size(batch=2, slots=2, blocks=5, k=128, hot_blocks=2), seed=5)
    for s in range(2):
        _host_request(trace, s)
    for step in range(12):
        picks = {s: np.sort(trace.rng.permutation(320)[:128])[None].astype(np.int32) for s in range(2)}
        trace.swap_in([step % 2, 1 - step % 2], picks)
    assert trace.counter("unplaced_rows") == 0


def positions_of_several_rows_are_fetched_once(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=4, k=64, hot_blocks=3, query_tokens=3), seed=6)
    _host_request(trace, 0)
    row = np.arange(100, 164, dtype=np.int32)
    trace.swap_in([0], {0: np.stack([row, row[::-1].copy(), row])})
    assert trace.counter("missed_rows") == 64
    assert trace.counter("hot_rows_hit") == 128
    trace.swap_in([0], {0: np.stack([row + 1, row + 2, row + 3])})
    assert trace.counter("missed_rows") == 67


def used_rows_stay(face: Face) -> None:
    """The same positions again cost nothing."""
    trace = Trace(face, Size(batch=1, slots=1, blocks=6, k=100, hot_blocks=3), seed=7)
    _host_request(trace, 0)
    picks = {0: trace.pick(0, 1.0)}
    trace.swap_in([0], picks)
    misses = trace.counter("missed_rows")
    for _ in range(3):
        trace.swap_in([0], picks)
    assert trace.counter("missed_rows") == misses


def nothing_but_padding(face: Face) -> None:
    trace = Trace(face, Size(batch=3, slots=2, blocks=2, k=64, hot_blocks=1), seed=8)
    trace.swap_in([NONE, NONE, NONE], {})
    trace.swap_in([], {})
    assert trace.counter("asked_rows") == 0


def no_positions(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=2, k=64, hot_blocks=1), seed=9)
    _host_request(trace, 0)
    trace.swap_in([0], {0: np.full((1, 64), NONE, np.int32)})


def rows_on_the_gpu_take_no_hot_slot(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=3, k=64, hot_blocks=1), seed=10)
    trace.start(0, 3)
    trace.swap_in([0], {0: np.arange(64, 128, dtype=np.int32)[None]})
    assert trace.counter("gpu_rows") == 64
    assert bool((trace.layer.tag == NONE).all())


def a_page_and_a_table_slot_are_used_again(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=2, k=64, hot_blocks=1), seed=11)
    row = np.arange(64, dtype=np.int32)[None]
    for _ in range(3):
        _host_request(trace, 0)
        trace.swap_in([0], {0: row})
        trace.end(0)
    assert trace.counter("missed_rows") == 3 * 64


def prefetched_rows_are_hits(face: Face) -> None:
    trace = Trace(face, Size(batch=2, slots=2, blocks=4, k=64, hot_blocks=2), seed=12)
    _host_request(trace, 1)
    row = np.arange(30, 94, dtype=np.int32)
    trace.prefetch([NONE, 1], np.stack([row, row]))
    assert trace.counter("prefetched_rows") == 64
    trace.swap_in([1], {1: row[None]})
    assert trace.counter("missed_rows") == 0
    assert trace.counter("prefetched_rows_used") == 64
    trace.swap_in([1], {1: row[None]})
    assert trace.counter("prefetched_rows_used") == 64


def prefetch_displaces_nothing_in_use(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=8, k=96, hot_blocks=2), seed=13)
    _host_request(trace, 0)
    old, used = np.arange(96, dtype=np.int32)[None], np.arange(200, 296, dtype=np.int32)[None]
    trace.swap_in([0], {0: old})
    trace.swap_in([0], {0: used})
    trace.prefetch([0], np.arange(300, 428, dtype=np.int32)[None])
    assert trace.counter("prefetched_rows") == trace.size.hot_rows - 96
    misses = trace.counter("missed_rows")
    trace.swap_in([0], {0: used})
    assert trace.counter("missed_rows") == misses


def prefetch_of_a_position_twice(face: Face) -> None:
    trace = Trace(face, Size(batch=1, slots=1, blocks=2, k=64, hot_blocks=1), seed=14)
    _host_request(trace, 0)
    trace.prefetch([0], np.array([[5, 5, NONE, 5, 70]], np.int32))
    assert trace.counter("prefetched_rows") == 2


BODIES = [
    random_trace,
    random_trace_of_bf16_rows,
    random_trace_of_three_query_tokens,
    random_trace_with_prefetch,
    hot_buffer_of_exactly_k_rows,
    positions_of_several_rows_are_fetched_once,
    used_rows_stay,
    nothing_but_padding,
    no_positions,
    rows_on_the_gpu_take_no_hot_slot,
    a_page_and_a_table_slot_are_used_again,
    prefetched_rows_are_hits,
    prefetch_displaces_nothing_in_use,
    prefetch_of_a_position_twice,
]
