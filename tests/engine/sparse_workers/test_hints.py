"""Hints in the worker half: written from hot buffers, read from slots that may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsieve_connector import worker as cache_mode
from kvsieve_connector.kernels.tables import COUNTERS
from kvsieve_connector.metadata import HintLoad, HintSave, StepOrders
from kvsieve_connector.sparse.hints import write_hint
from kvsieve_store.client import Attachment, SlotRef, StoreClient
from tests.engine.sparse_vllm import BLOCK
from tests.engine.sparse_worker import LAYERS, Worker, backed, numbered


def hinted(worker: Worker, client: StoreClient, attachment: Attachment, *positions: int) -> SlotRef:
    """A slot with the hint of a request that has ended, whose hot rows were these in layer 0."""
    worker.step(backed(attachment.epoch, (0, 1), (1, 2)), a=(200, 1))
    worker.swap_in(0, list(positions))
    (ref,) = client.take_credits(1, epoch=attachment.epoch)
    worker.step(StepOrders(hint_saves=[HintSave(7, ref.slot, "a")], host_ended=["a"]))
    return ref


def load(worker: Worker, attachment: Attachment, ref: SlotRef, tokens: int = 2 * BLOCK) -> StepOrders:
    """Orders for a request that begins with so many tokens of the store."""
    orders = backed(attachment.epoch, (0, 1), (1, 2), name="b", first=40)
    orders.hint_loads.append(HintLoad("b", attachment.epoch, ref, tokens))
    return orders


def counts(worker: Worker) -> dict[str, int]:
    return dict(zip(COUNTERS, worker.tables.counters.sum((0, 1)).tolist(), strict=True))


def test_the_rows_that_were_hot_are_hot_where_the_hint_is_read(worker: Worker, attach: Any) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    ref = hinted(worker, client, attachment, 1, 70)
    report = worker.half.report()
    assert report is not None
    assert (report.saved, report.failed) == ({7: 1}, {})
    worker.step(load(worker, attachment, ref), b=(200, 1))
    assert counts(worker)["prefetched_rows"] == 2
    worker.swap_in(0, [1, 70])
    assert (counts(worker)["missed_rows"], counts(worker)["prefetched_rows_used"]) == (2, 2)
    assert worker.half.stats.data["used_hints"] == 1
    assert worker.half.stats.data["warmed_rows"] == 2
    assert not worker.half.stats.data["refused_hints"]


def test_rows_past_the_tokens_that_were_matched_are_left_out(worker: Worker, attach: Any) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    ref = hinted(worker, client, attachment, 1, 70)
    worker.step(load(worker, attachment, ref, tokens=BLOCK), b=(200, 1))
    assert counts(worker)["prefetched_rows"] == worker.half.stats.data["warmed_rows"] == 1


@pytest.mark.parametrize("what", ["random", "another shape", "no row", "reused"])
def test_a_slot_that_holds_no_hint_is_refused(worker: Worker, attach: Any, what: str) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    ref = hinted(worker, client, attachment, 1, 70)
    arena = worker.half._arena
    assert arena is not None
    slot = arena.slot(ref.slot)
    if what == "random":
        slot[:] = np.random.default_rng(0).integers(0, 256, len(slot))
    elif what == "another shape":
        write_hint(slot, np.zeros((LAYERS + 1, 8), np.int32), BLOCK)
    elif what == "no row":
        write_hint(slot, np.full((LAYERS, 8), 3 * BLOCK, np.int32), BLOCK)
    else:
        ref = SlotRef(ref.slot, ref.generation + 1)
    worker.step(load(worker, attachment, ref), b=(200, 1))
    assert counts(worker)["prefetched_rows"] == 0
    assert worker.half.stats.data["refused_hints"] == 1
    assert not worker.half.stats.data["used_hints"]
    assert worker.swap_in(0, [1]) is not None


@pytest.mark.parametrize("reads", [True, False])
def test_where_no_row_was_hot_nothing_is_written(worker: Worker, attach: Any, reads: bool) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    worker.step(backed(attachment.epoch, *([(0, 1)] if reads else [])), a=(200, 1))
    (ref,) = client.take_credits(1)
    worker.step(StepOrders(hint_saves=[HintSave(7, ref.slot, "a")], host_ended=["a"]))
    report = worker.half.report()
    assert report is not None
    assert (report.saved, report.failed) == ({}, {7: 1})


def test_rank_0_writes_and_every_rank_reports(
    make: Callable[..., Worker], attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, attachment = attach()
    monkeypatch.setattr(cache_mode, "get_tensor_model_parallel_rank", lambda: 1)
    worker = make()
    worker.step(StepOrders(attachment=attachment))
    ref = hinted(worker, client, attachment, 1, 70)
    report = worker.half.report()
    assert report is not None
    assert report.saved == {7: 1}
    arena = worker.half._arena
    assert arena is not None
    assert not arena.slot(ref.slot).any()


def test_a_hint_does_not_reach_the_arena_of_another_session(worker: Worker, attach: Any) -> None:
    client, first = attach()
    worker.step(StepOrders(attachment=first))
    worker.step(backed(first.epoch, (0, 1)), a=(200, 1))
    worker.swap_in(0, [1])
    (ref,) = client.take_credits(1)
    worker.half.begin(StepOrders(hint_saves=[HintSave(7, ref.slot, "a")], host_ended=["a"]))
    client.close()
    _, second = attach()
    worker.step(StepOrders(attachment=numbered(second, first.epoch + 1)))
    assert worker.half.report() is None
    arena = worker.half._arena
    assert arena is not None
    assert not arena.slot(ref.slot).any()


def test_hints_of_a_session_that_is_over_are_not_read(worker: Worker, attach: Any) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    ref = hinted(worker, client, attachment, 1, 70)
    orders = load(worker, attachment, ref)
    worker.step(StepOrders(detach=True))
    worker.step(orders, b=(200, 1))
    assert counts(worker)["prefetched_rows"] == 0
