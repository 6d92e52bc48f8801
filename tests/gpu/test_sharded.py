"""Ranks that fetch for one another, in one process: on two GPUs, or on streams of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

from kvsieve_connector.kernels import swap_in  # noqa: E402
from tests.unit.sharded_trace import Ranks, all_pairs, run_ranks  # noqa: E402
from tests.unit.swap_in_trace import NONE, Call, Face, Size, Trace  # noqa: E402

LONG_NS = 20_000_000_000
"""Patience of a test that nobody is late in; it is waited for only when something is wrong."""
SHORT_NS = 50_000

ONE, TWO = ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]
SMALL = Size(batch=3, slots=4, blocks=12, k=512, hot_blocks=16)
CASES = {
    "one GPU": (ONE, Size(batch=4, slots=5, blocks=64, k=2048, hot_blocks=64), 100),
    "one GPU, three query tokens": (
        ONE,
        Size(batch=2, slots=3, blocks=64, k=1024, hot_blocks=64, query_tokens=3),
        60,
    ),
    "one GPU, three ranks": ([*ONE, "cuda:0"], SMALL, 60),
    "batch 1": (TWO, Size(batch=1, slots=2, blocks=96, k=2048, hot_blocks=64), 200),
    "batch 8": (TWO, Size(batch=8, slots=10, blocks=96, k=2048, hot_blocks=64), 200),
    "batch 32": (TWO, Size(batch=32, slots=34, blocks=64, k=2048, hot_blocks=64), 60),
    "exactly k": (TWO, Size(batch=8, slots=9, blocks=64, k=2048, hot_blocks=32), 100),
    "three query tokens": (
        TWO,
        Size(batch=8, slots=9, blocks=128, k=2048, hot_blocks=144, query_tokens=3),
        60,
    ),
    "bf16": (TWO, Size(batch=8, slots=9, blocks=64, k=2048, hot_blocks=64, row_bytes=1152), 100),
    "odd k": (TWO, Size(batch=5, slots=6, blocks=32, k=515, hot_blocks=16), 100),
    "four ranks": ([*TWO, *TWO], SMALL, 60),
    "eight ranks": ([*TWO] * 4, Size(batch=1, slots=2, blocks=12, k=512, hot_blocks=16), 60),
}


class OnStream:
    """The kernels, on a device and a stream of their own."""

    def __init__(self, device: str) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    def swap_in(self, *args: Any, **kwargs: Any) -> None:
        with self._here():
            swap_in.swap_in(*args, **kwargs)

    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        with self._here():
            swap_in.prefetch(*args, **kwargs)
        self._stream.synchronize()


def made(devices: list[str], size: Size, patience_ns: int) -> Ranks:
    """Ranks whose kernels are compiled and loaded."""
    if int(devices[1][-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    for one, other in [(0, 1), (1, 0)] if "cuda:1" in devices else []:
        with torch.cuda.device(one), contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            cupy.cuda.runtime.deviceEnablePeerAccess(other)  # fails where it is already
    ranks = Ranks(
        [Face(OnStream(device), device) for device in devices], size, seed=31, patience_ns=patience_ns
    )
    for trace in ranks.traces:
        launch(trace, trace.prepare([NONE], {}))
    settle(ranks.traces)
    return ranks


def launch(trace: Trace, call: Call) -> None:
    trace.face.module.swap_in(**call.arguments)


def settle(traces: list[Trace]) -> None:
    for device in {trace.face.device for trace in traces}:
        torch.cuda.synchronize(device)


def at_once(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
    settle(traces)
    for trace, call in zip(traces, calls, strict=True):
        launch(trace, call)
    settle(traces)
    return all_pairs(len(traces))


@pytest.mark.parametrize("case", CASES)
def test_rows_come_from_their_owners(case: str) -> None:
    devices, size, steps = CASES[case]
    ranks = made(devices, size, LONG_NS)
    run_ranks(ranks, at_once, steps, diverge=0.1)
    for number, trace in enumerate(ranks.traces):
        missed, shared = trace.counter("missed_rows"), trace.counter("peer_rows")
        print(f"= {case}, rank {number}: {missed} rows missed, {shared} of them read from others")
        assert shared > 0
        assert trace.counter("late_rows") == 0
        assert trace.counter("unplaced_rows") == 0
    assert not any(peers.silent.any() for peers in ranks.peers)


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one GPU", "two GPUs"])
def test_a_rank_that_never_runs_is_done_without(devices: list[str]) -> None:
    ranks = made(devices, SMALL, SHORT_NS)
    ranks.traces[1].layer = replace(ranks.traces[1].layer, peers=None)

    def alone(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
        at_once(traces[:1], calls[:1])
        at_once(traces[1:], calls[1:])
        return []

    run_ranks(ranks, alone, steps=40, diverge=0.1)
    assert ranks.traces[0].counter("late_rows") > 0
    assert int(ranks.peers[0].silent[1]) > 0


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one GPU", "two GPUs"])
def test_one_after_the_other(devices: list[str]) -> None:
    """The first finds the second late; the second reads from the first, and waits for it as ever."""
    ranks = made(devices, SMALL, SHORT_NS)
    ranks.peers[1].silent.fill_(31)
    settle(ranks.traces)

    def in_turn(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
        at_once(traces[:1], calls[:1])
        at_once(traces[1:], calls[1:])
        return [(1, 0)]

    run_ranks(ranks, in_turn, steps=40, diverge=0.1)
    assert ranks.traces[0].counter("late_rows") > 0
    assert ranks.traces[1].counter("peer_rows") > 0
    assert int(ranks.peers[1].silent[0]) == 0


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one GPU", "two GPUs"])
def test_tables_that_differ_are_not_trusted(devices: list[str]) -> None:
    ranks = made(devices, SMALL, SHORT_NS)

    def marked(traces: list[Trace], calls: list[Call]) -> list[tuple[int, int]]:
        ranks.peers[1].mark.add_(1 << 40)
        at_once(traces, calls)
        return []

    run_ranks(ranks, marked, steps=20)
    assert ranks.traces[0].counter("peer_rows") == 0
