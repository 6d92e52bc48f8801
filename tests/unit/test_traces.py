"""The simulator of hot buffers: small traces, things that must hold whatever the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.traces.capacity import requests_held
from bench.traces.counts import Counts
from bench.traces.hot_buffer import REPLACEMENTS, Belady, HotBuffer, Lru
from bench.traces.measure import measure
from bench.traces.simulate import Run, simulate
from bench.traces.synthetic import Recipe, synthetic
from bench.traces.trace import Trace
from bench.traces.waits import Link, exposed_us
from kvsieve_connector.sparse.prefetch import NAMES, Prefetch, make_policy

SMALL = {"steps": 40, "layers": 4, "k": 64, "tokens": 1000}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic(Recipe("small", 0.7, share=2, **SMALL))


def same(a: Run, b: Run) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("hits", "misses", "gpu"))


# Traces


@pytest.mark.parametrize("overlap", [0.5, 0.7, 0.85, 0.97])
def test_synthetic_overlaps_are_as_asked(overlap: float) -> None:
    made = synthetic(Recipe("", overlap, layer_overlap=0.8, **SMALL))
    assert np.abs(made.step_overlap() - overlap).max() < 0.02
    # Layers' own positions meet by chance too.
    assert np.all(made.layer_overlap() > 0.79)
    assert np.all(made.layer_overlap() < 0.86)


def test_positions_are_ascending_distinct_and_there(trace: Trace) -> None:
    assert np.all(np.diff(trace.topk.astype(int), axis=-1) > 0)
    assert all(trace.topk[step].max() == trace.start + step for step in range(trace.steps))


def test_layers_share_an_index(trace: Trace) -> None:
    assert trace.leaders == (0, 0, 2, 2)
    assert np.array_equal(trace.topk[:, 0], trace.topk[:, 1])
    assert not np.array_equal(trace.topk[:, 1], trace.topk[:, 2])


def test_shares_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="too many for step_overlap"):
        synthetic(Recipe("x", 0.5, recent=0.7, **SMALL))


def test_window() -> None:
    made = Trace("", np.zeros((9, 1, 1), np.uint16), start=19, block_tokens=4, leaders=(0,))
    # 20 tokens: blocks 3 and 4 are the newest full ones. From 24 tokens on: blocks 4 and 5.
    assert [made.window(step, 2) for step in (0, 3, 4)] == [12, 12, 16]
    assert made.window(0, 9) == 0


# Hot buffers


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_tables_stay_consistent(kind: type[HotBuffer]) -> None:
    random = np.random.default_rng(0)
    buffer = kind(12, 50)
    present: set[int] = set()
    for turn in range(200):
        rows = np.sort(random.choice(50, 9, replace=False))
        if turn % 3 == 1:
            last = set(buffer.tag[buffer.stamp == buffer.epoch]) - {-1}
            assert buffer.prefetch(rows, budget=2) <= 2
            assert last <= set(buffer.tag), "a row of the last swap-in was displaced"
        else:
            misses, _ = buffer.swap_in(rows)
            assert misses == len(set(rows) - present)
            assert set(rows) <= set(buffer.tag)
        present = set(buffer.tag) - {-1}
        held = buffer.tag[buffer.tag >= 0]
        assert len(set(held)) == len(held)
        assert np.array_equal(buffer.tag[buffer.slot_of[held]], held)
        assert (buffer.slot_of >= 0).sum() == len(held)


def test_clock_gives_a_second_chance() -> None:
    buffer = HotBuffer(4, 10)
    buffer.swap_in(np.array([0, 1, 2, 3]))
    buffer.swap_in(np.array([4]))  # the hand turns once, takes every chance, then the first row
    assert list(buffer.tag) == [4, 1, 2, 3]
    buffer.swap_in(np.array([1]))
    buffer.swap_in(np.array([5]))  # 1 was used since: 2 goes
    assert list(buffer.tag) == [4, 1, 5, 3]


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="5 rows do not fit into a hot buffer of 4"):
        HotBuffer(4, 10).swap_in(np.arange(5))


# Runs


@pytest.mark.parametrize("kind", REPLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_position_is_a_hit_or_a_miss(trace: Trace, name: str, kind: type[HotBuffer]) -> None:
    run = simulate(trace, make_policy(name, trace.layers, leaders=trace.leaders), 96, replacement=kind)
    assert np.all(run.gpu + run.hits + run.misses == trace.k)
    counts = run.counts()
    assert counts.asked_rows == (trace.steps - 1) * trace.layers * trace.k
    assert 0 <= counts.prefetched_rows_used <= counts.prefetched_rows + run.warm.sum()


def test_none_is_the_plain_hot_buffer(trace: Trace) -> None:
    run = simulate(trace, make_policy("none", trace.layers), 96)
    buffer = HotBuffer(96, trace.tokens)
    for step in range(1, trace.steps):
        rows = trace.topk[step, 3].astype(np.int64)
        misses, _ = buffer.swap_in(rows[rows < trace.window(step, 2)])
        assert run.misses[step - 1, 3] == misses
    assert run.counts().prefetched_rows == run.warm.sum() == 0


@pytest.mark.parametrize("hot_rows", [64, 96, 256])
def test_no_replacement_has_fewer_misses_than_belady(trace: Trace, hot_rows: int) -> None:
    policy = make_policy("none", trace.layers)
    misses = {
        kind: simulate(trace, policy, hot_rows, replacement=kind).misses.sum(0) for kind in REPLACEMENTS
    }
    assert all(np.all(misses[Belady] <= each) for each in misses.values())


def test_larger_hot_buffers_miss_less(trace: Trace) -> None:
    policy = make_policy("none", trace.layers)
    misses = [simulate(trace, policy, rows, replacement=Lru).misses.sum() for rows in (64, 96, 128, 512)]
    assert all(a > b for a, b in pairwise(misses))


@pytest.mark.parametrize("hot_rows", [64, 96])
def test_the_previous_steps_rows_are_hot_without_prefetch(trace: Trace, hot_rows: int) -> None:
    policy = make_policy("previous-step", trace.layers)
    often = replace(policy, steps=tuple((Prefetch("previous-step", i),) for i in range(trace.layers)))
    run = simulate(trace, often, hot_rows)
    assert same(run, simulate(trace, policy, hot_rows))
    assert run.counts().prefetched_rows == 0


def test_warm_start(trace: Trace) -> None:
    cold, warm = (simulate(trace, make_policy(name, trace.layers), 96) for name in ("none", "previous-step"))
    assert np.all(cold.hits[0] == 0)
    assert np.all(warm.misses[0] < cold.misses[0] / 2)
    assert np.all(warm.warm >= warm.hits[0])


def test_an_exact_prefetch_with_room_leaves_no_miss(trace: Trace) -> None:
    policy = make_policy("index-share", trace.layers, leaders=trace.leaders)
    run = simulate(trace, policy, 3 * trace.k)
    assert np.all(run.misses[:, [1, 3]] == 0)
    assert np.all(run.misses[:, [0, 2]].sum(0) > 0)
    assert np.array_equal(run.prefetched[:, [1, 3]], run.used[:, [1, 3]])


def test_hot_rows_must_hold_a_step(trace: Trace) -> None:
    with pytest.raises(ValueError, match="hot_rows is 63, must hold the 64 rows"):
        simulate(trace, make_policy("none", trace.layers), 63)


def test_counts() -> None:
    counts = Counts(
        asked_rows=100,
        gpu_rows=20,
        hot_rows_hit=60,
        missed_rows=20,
        prefetched_rows=30,
        prefetched_rows_used=12,
    )
    assert counts.hit_rate == 0.75
    assert counts.prefetched_rows_wasted == 18
    assert counts.swapped_in_bytes(656) == 50 * 656
    assert Counts().hit_rate == 1


# Waits

LINK = Link(latency_us=4, gb_s=1, compute_us=60, requests=1, row_bytes=1000)  # a row: 1 us


def waits(name: str, misses: list[int], prefetched: list[int], **arguments: object) -> list[float]:
    policy = make_policy(name, len(misses), **arguments)  # type: ignore[arg-type]
    return list(exposed_us(np.array([misses]), np.array([prefetched]), policy, 1, LINK)[0])


def test_misses_are_waited_for() -> None:
    assert waits("none", [10, 0, 20], [0, 0, 0]) == [14, 0, 24]


def test_a_prefetch_hides_behind_compute() -> None:
    assert waits("previous-layer", [10, 0, 5], [0, 50, 0]) == [14, 0, 9]
    assert waits("previous-layer", [10, 2, 0], [0, 100, 0]) == [14, 44 + 6, 0]


def test_a_leaders_followers_queue() -> None:
    assert waits("index-share", [10, 0, 0], [0, 50, 70], leaders=(0, 0, 0)) == [14, 0, 8]


def test_the_measured_swap_in() -> None:
    link = Link(requests=1)
    assert 3.8 + link.fetch_us(274) == pytest.approx(11.0, abs=0.1)
    assert 3.8 + Link(requests=8).fetch_us(274) == pytest.approx(37.5, rel=0.1)


def test_capacity() -> None:
    assert requests_held(3072) > 31
    assert 30 < requests_held(3456) < 31
    assert requests_held(4096) < 30


def test_report(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.output import save

    report = measure([trace], sizes=(1.5, 2.0), batches=(8,), warm_up=8)
    record = json.loads(save(report, tmp_path).read_text())
    assert len(record["rows"]) == 2 * (6 + 5)
    assert {"hit_rate", "prefetched_wasted", "bytes", "wait_us_batch_8"} <= set(record["rows"][0])
    assert (tmp_path / "traces.png").read_bytes().startswith(b"\x89PNG")


# The swap-in itself


def test_the_swap_in_reference_does_the_same() -> None:
    """Row by row and slot by slot, with prefetches in between."""
    torch = pytest.importorskip("torch")
    from kvsieve_connector.kernels import swap_in_reference
    from kvsieve_connector.kernels.tables import COUNTERS, LayerCache, RequestTables

    block_tokens, blocks, hot_blocks, row_bytes, k = 16, 12, 3, 16, 30
    hot_rows, pages = hot_blocks * block_tokens, blocks + 1
    arena = np.arange(pages * block_tokens * row_bytes, dtype=np.uint8)

    def full(value: int, *shape: int, dtype: object = torch.int32) -> object:
        return torch.full(shape, value, dtype=dtype)

    layer = LayerCache(
        cache=full(0, hot_blocks, block_tokens, row_bytes, dtype=torch.uint8),
        layer_offset=0,
        group=0,
        slot_of=full(-1, pages * block_tokens, dtype=torch.int16),
        tag=full(-1, 1, hot_rows),
        stamp=full(0, 1, hot_rows),
        clock=full(0, 1, 2),
        counters=full(0, 1, len(COUNTERS), dtype=torch.int64),
    )
    tables = RequestTables(
        row_slot=full(0, 1),
        page=torch.arange(1, pages, dtype=torch.int32)[None],
        page_addr=torch.arange(pages) * block_tokens * row_bytes + arena.ctypes.data,
        hot_blocks=torch.arange(hot_blocks, dtype=torch.int32)[None, None],
    )
    buffer = HotBuffer(hot_rows, pages * block_tokens)
    random = np.random.default_rng(0)
    misses = prefetched = 0
    for _ in range(60):
        if ahead := int(random.integers(0, 8)):
            rows = np.sort(random.choice(blocks * block_tokens, ahead, replace=False))
            prefetched += buffer.prefetch(rows + block_tokens)
            swap_in_reference.prefetch(layer, tables, torch.tensor(rows, dtype=torch.int32)[None])
        rows = np.sort(random.choice(blocks * block_tokens, k, replace=False))
        misses += buffer.swap_in(rows + block_tokens)[0]
        topk = torch.tensor(rows, dtype=torch.int32)[None]
        swap_in_reference.swap_in(
            layer,
            tables,
            topk,
            full(0, 1, blocks),
            full(0, 1, k),
            None,
            query_tokens=1,
            stride_rows=block_tokens,
        )
        assert layer.tag[0].tolist() == buffer.tag.tolist()
    counted = dict(zip(COUNTERS, layer.counters[0].tolist(), strict=True))
    assert (counted["missed_rows"], counted["prefetched_rows"]) == (misses, prefetched)
    assert counted["unplaced_rows"] == 0
