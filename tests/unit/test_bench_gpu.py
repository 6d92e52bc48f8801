"""The parts of bench/gpu that need no device: which steps count, and that its traces miss as they say."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import swap_in, swap_in_tp
from bench.gpu.steps import DecodeSpeed, Step, decode_speed


def test_only_steps_of_the_largest_batch_without_prefill_count() -> None:
    steps, at = [], 0.0

    def add(count: int, seconds: float, decoding: int, prefilled: int = 0) -> None:
        nonlocal at
        for _ in range(count):
            at += seconds
            steps.append(Step(at, decoding, prefilled))

    add(20, 0.25, 3, 2048)
    add(12, 0.015625, 4)
    add(1, 0.25, 3, 2048)  # the next request's prefill
    add(12, 0.015625, 4)
    add(50, 0.0078125, 2)  # some have ended
    found = decode_speed(steps, settling=8)
    assert found == DecodeSpeed(requests=4, steps=6, itl_ms=15.625, itl_p95_ms=15.625, tokens_s=256.0)


def test_no_decode_is_an_error() -> None:
    with pytest.raises(ValueError, match="decode more tokens"):
        decode_speed([Step(0.1 * i, 1, 2048) for i in range(9)])


@pytest.mark.parametrize(("batch", "misses"), [(1, 0), (2, 20), (3, 40)])
def test_a_trace_misses_as_many_rows_as_it_says(
    batch: int, misses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("K", 128), ("HOT_ROWS", 256), ("LAYERS", 2)):
        monkeypatch.setattr(swap_in, name, value)
    device = torch.device("cpu")
    trace = swap_in.Trace.of(batch, misses, device)
    host = swap_in.Host.of(trace, 656, pin=False)
    ours = swap_in.Ours(trace, host, device)
    for _ in range(2):
        before = ours.missed()
        for topk in trace.topk.unbind(0):
            for call in ours.calls:
                call(topk)
    assert (ours.missed() - before) / len(trace.topk) / 2 / batch == misses
    swap_in.check_rows(ours, trace, host)


def test_joined_ranks_fetch_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (swap_in, swap_in_tp):
        for name, value in (("K", 128), ("HOT_ROWS", 256), ("LAYERS", 2)):
            monkeypatch.setattr(module, name, value)
    trace = swap_in.Trace.of(2, 40, torch.device("cpu"))
    host = swap_in.Host.of(trace, 656, pin=False)
    ranks = [swap_in.Ours(trace, host, torch.device("cpu")) for _ in range(2)]
    swap_in_tp.join(ranks)
    for topk in trace.topk.unbind(0):
        for layer in range(2):
            for rank in ranks:  # one after the other: the first finds the second late
                rank.calls[layer](topk)
    for rank in ranks:
        swap_in.check_rows(rank, trace, host)
    first, second = ranks
    assert first.count("peer_rows") == second.count("late_rows") == 0
    assert first.count("late_rows") > 0.4 * first.missed()
    assert second.count("peer_rows") > 0.4 * second.missed()
