"""The reference of a swap_in that ranks share: rows are exact, whoever is late and whatever is hot where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvsieve_connector.kernels import swap_in_reference  # noqa: E402
from kvsieve_connector.kernels.tables import MAX_PEERS, owner  # noqa: E402
from tests.unit.sharded_trace import Ranks, Run, run_ranks  # noqa: E402
from tests.unit.swap_in_trace import Call, Face, Size, Trace  # noqa: E402

REFERENCE = Face(swap_in_reference, "cpu")
SIZE = Size(batch=3, slots=4, blocks=5, k=64, hot_blocks=2)


def in_order(order: list[int]) -> Run:
    """order: ranks, each twice; the first time its call begins, the second time it ends."""

    def run(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
        finish, published = {}, []
        for rank in order:
            if rank in finish:
                published += [(rank, other) for other in finish if other != rank]
                finish[rank]()
            else:
                finish[rank] = swap_in_reference.begin(**calls[rank].arguments)
        return published

    return run


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rows_come_from_their_owners(count: int) -> None:
    ranks = Ranks([REFERENCE] * count, SIZE, seed=1, patience_ns=0)
    run_ranks(ranks, in_order([*range(count), *range(count)]), steps=12)
    for trace in ranks.traces:
        assert trace.counter("peer_rows") > 0
        assert trace.counter("late_rows") == 0
        assert trace.counter("unplaced_rows") == 0


def test_three_query_tokens() -> None:
    size = Size(batch=2, slots=3, blocks=6, k=64, hot_blocks=3, query_tokens=3)
    ranks = Ranks([REFERENCE] * 2, size, seed=2, patience_ns=0)
    run_ranks(ranks, in_order([0, 1, 1, 0]), steps=10)


def test_a_rank_that_never_runs_is_done_without() -> None:
    ranks = Ranks([REFERENCE] * 3, SIZE, seed=3, patience_ns=0)
    ranks.traces[1].layer = replace(ranks.traces[1].layer, peers=None)
    run_ranks(ranks, in_order([0, 2, 0, 2, 1, 1]), steps=10)
    assert ranks.traces[0].counter("late_rows") > 0
    assert ranks.traces[0].counter("peer_rows") > 0


def test_tables_that_differ_are_not_trusted() -> None:
    ranks = Ranks([REFERENCE] * 2, SIZE, seed=4, patience_ns=0)

    def run(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
        ranks.peers[1].mark.add_(1 << 40)
        in_order([0, 1, 0, 1])(traces, calls)
        return []

    run_ranks(ranks, run, steps=6)
    assert ranks.traces[0].counter("late_rows") > 0


def test_a_row_that_its_owner_has_not_got_comes_from_the_host() -> None:
    """The ranks' lists differ, which they should not."""
    ranks = Ranks([REFERENCE] * 2, SIZE, seed=5, patience_ns=0)
    for _ in range(4):
        ranks.change()
    calls = [trace.prepare(*trace.draw(1.0)) for trace in ranks.traces]
    calls[1].arguments["topk"].fill_(-1)
    calls[1].want.fill_(-1)
    ranks.traces[1].missing.clear()
    in_order([0, 1, 0, 1])(ranks.traces, calls)
    trace = ranks.traces[0]
    trace.check(calls[0])
    assert trace.counter("missed_rows") > 0
    assert trace.counter("peer_rows") == trace.counter("late_rows") == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_size_in_any_order(data: st.DataObject) -> None:
    draw = data.draw
    count = draw(st.integers(2, 4))
    query_tokens = draw(st.sampled_from([1, 3]))
    hot_blocks = draw(st.integers(1, 3))
    size = Size(
        batch=draw(st.integers(1, 3)),
        slots=3,
        blocks=draw(st.integers(2, 5)),
        k=draw(st.integers(1, hot_blocks * 64 // query_tokens)),
        hot_blocks=hot_blocks,
        query_tokens=query_tokens,
        row_bytes=draw(st.sampled_from([656, 16])),
        groups=draw(st.integers(1, 2)),
    )
    ranks = Ranks([REFERENCE] * count, size, draw(st.integers(0, 1000)), patience_ns=0)
    for _ in range(5):
        order = draw(st.permutations([*range(count), *range(count)]))
        run_ranks(ranks, in_order(list(order)), steps=1, diverge=draw(st.sampled_from([0.0, 0.5])))


@pytest.mark.parametrize("count", [2, 3, 5, 8, MAX_PEERS])
def test_rows_are_spread_evenly_over_the_ranks(count: int) -> None:
    for step in (1, 2, 64):
        share = Counter(owner(row, count) for row in range(7 * 64, 7 * 64 + 2000 * step, step))
        assert set(share) == set(range(count))
        assert max(share.values()) - min(share.values()) <= 0.2 * 2000 / count + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, r"rank must be 0..1, got 2"),
        ({"places": torch.zeros(1, 3, dtype=torch.int64)}, r"peers must be 2..32, got 1"),
        ({"flags": torch.zeros(4, 3, dtype=torch.int64)}, r"flags must be torch.int64 \[4, 2\]"),
        ({"silent": torch.zeros(3, dtype=torch.int32)}, r"silent must be torch.int32 \[2\]"),
    ],
)
def test_bad_peers_are_named(changes: dict[str, object], message: str) -> None:
    ranks = Ranks([REFERENCE] * 2, SIZE, seed=6, patience_ns=0)
    trace = ranks.traces[0]
    trace.layer = replace(trace.layer, peers=replace(ranks.peers[0], **changes))
    trace.start(0, 2)
    with pytest.raises(ValueError, match=message):
        trace.swap_in([0], {0: trace.pick(0, 1.0)})
