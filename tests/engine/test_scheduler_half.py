"""The scheduler half step by step, with a scripted client: what an engine can't be made to do at will.

Sessions are lost between two calls, ranks report at different steps, the store refuses. No engine runs here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvsieve_connector.metadata import WorkerReport
from kvsieve_store.client import Attachment, Fetch, Match, SealResult, SlotRef
from kvsieve_store.errors import SlotNotHeldError, UnavailableError
from tests.engine.scheduler_script import BLOCK, Scene, answer, attachment


def test_a_match_is_waited_for_without_blocking_and_becomes_a_load() -> None:
    scene = Scene()
    request = scene.request("a", 5)
    scene.half.on_new_request(request)
    assert scene.half.matched_tokens(request, 0) == (None, False)
    scene.client.matches[0].set_result(answer(3))
    assert scene.half.matched_tokens(request, BLOCK) == (2 * BLOCK, True)
    scene.half.allocated(request, scene.blocks("a"), 2 * BLOCK)
    (order,) = scene.step().loads
    assert order.refs == (SlotRef(51, 3), SlotRef(52, 3))
    assert order.pages == (((2,),), ((3,),))
    assert order.instance == b"one"
    scene.half.loads_ended(["a"], [])
    scene.step()
    assert scene.client.leases_back == [(7, 1)]


@pytest.mark.parametrize("back", [None, attachment(2, b"two")])
def test_a_load_that_vllm_waits_for_is_ordered_though_the_session_is_lost(back: Attachment | None) -> None:
    scene = Scene()
    request = scene.request("a", 5)
    scene.half.on_new_request(request)
    scene.client.matches[0].set_result(answer(3))
    assert scene.half.matched_tokens(request, 0) == (3 * BLOCK, True)
    scene.client.attachment = back  # lost, or lost and replaced, between two calls of one step
    scene.half.allocated(request, scene.blocks("a"), 3 * BLOCK)
    (order,) = scene.step().loads
    assert order.req_id == "a"
    assert order.instance == b"one"
    scene.half.loads_ended(["a"], ["a"])
    assert scene.half.matched_tokens(request, 0) == (0, False)


def test_an_answer_of_another_session_is_not_used() -> None:
    scene = Scene()
    request = scene.request("a", 5)
    scene.half.on_new_request(request)
    scene.client.matches[0].set_result(answer(3, epoch=1))
    scene.client.attachment = attachment(2, b"two")
    assert scene.half.matched_tokens(request, 0) == (0, False)


def test_a_lease_goes_back_in_the_epoch_of_its_answer() -> None:
    scene = Scene()
    request = scene.request("a", 5)
    scene.half.on_new_request(request)
    scene.half.finished(request)
    scene.client.matches[0].set_result(answer(3, lease=9, epoch=2))
    assert scene.client.leases_back == [(9, 2)]


def test_a_block_is_sealed_when_every_rank_has_written_it() -> None:
    scene = Scene(ranks=2)
    request = scene.request("a", 2)
    scene.half.on_new_request(request)
    jobs = [order.job for order in scene.step(a=2 * BLOCK).saves]
    assert len(jobs) == 2
    scene.half.take_report(WorkerReport(saved={jobs[0]: 2, jobs[1]: 1}))
    assert [len(entries) for entries, _ in scene.client.seals] == [1]
    scene.half.take_report(WorkerReport(saved={jobs[1]: 1}))
    assert [len(entries) for entries, _ in scene.client.seals] == [1, 1]
    (first,), (second,) = (entries for entries, _ in scene.client.seals)
    assert (first.parent, second.parent) == (b"", first.key)
    assert scene.half.has_pending_work()
    for _, future in scene.client.seals:
        future.set_result([SealResult.SEALED])
    scene.half.take_report(None)
    assert not scene.half.has_pending_work()
    assert scene.half.stats.data["saved_blocks"] == 2


def test_a_slot_goes_back_only_when_no_rank_may_write_to_it_any_more() -> None:
    scene = Scene(ranks=2)
    scene.half.on_new_request(scene.request("a", 1))
    (order,) = scene.step(a=BLOCK).saves
    scene.half.take_report(WorkerReport(failed={order.job: 1}))
    assert scene.client.slots_back == []
    scene.half.take_report(WorkerReport(saved={order.job: 1}))
    assert scene.client.slots_back == [SlotRef(0, 1)]
    assert scene.client.seals == []


@pytest.mark.parametrize(
    ("error", "back"),
    [(SlotNotHeldError("slots[0]"), [SlotRef(0, 1)]), (UnavailableError("lost"), [])],
)
def test_a_refused_seal_gives_its_slots_back_unless_the_session_is_gone(
    error: Exception, back: list[SlotRef]
) -> None:
    scene = Scene()
    scene.half.on_new_request(scene.request("a", 1))
    (order,) = scene.step(a=BLOCK).saves
    scene.half.take_report(WorkerReport(saved={order.job: 1}))
    scene.client.seals[0][1].set_exception(error)
    scene.half.take_report(None)
    scene.half.take_report(None)
    assert scene.client.slots_back == back
    assert scene.half.stats.data["failed_saves"] == 1
    assert not scene.half.has_pending_work()


def test_what_had_no_slot_is_tried_again_and_counted_when_the_request_ends() -> None:
    scene = Scene()
    scene.client.slots = [SlotRef(0, 1)]
    request = scene.request("a", 3)
    scene.half.on_new_request(request)
    assert len(scene.step(a=3 * BLOCK).saves) == 1
    request.num_computed_tokens = 3 * BLOCK
    scene.client.slots = [SlotRef(1, 1)]
    assert [order.pages for order in scene.step(a=1).saves] == [((2,),)]
    scene.half.finished(request)
    assert scene.half.stats.data["skipped_saves"] == 1


def test_a_block_that_a_window_has_passed_ends_the_request_s_saves() -> None:
    scene = Scene(groups=2)
    request = scene.request("a", 4)
    scene.half.on_new_request(request)
    scene.tables["a"][1][1] = 0  # the second group has lost its second block
    orders = scene.step(a=4 * BLOCK)
    assert [order.pages for order in orders.saves] == [((1,), (1,))]
    assert scene.step(a=0).saves == []
    assert len(scene.client.slots) == 99
    request.num_computed_tokens = 4 * BLOCK
    scene.half.finished(request)
    assert scene.half.stats.data["skipped_saves"] == 3


def test_a_lost_session_is_forgotten_and_the_next_one_gets_everything_again() -> None:
    scene = Scene()
    request = scene.request("a", 2)
    scene.half.on_new_request(request)
    orders = scene.step(a=2 * BLOCK)
    assert orders.attachment == attachment(1)
    scene.client.attachment = None
    orders = scene.step()
    assert orders.detach
    assert not scene.half.has_pending_work()
    scene.client.attachment = attachment(2, b"two")
    request.num_computed_tokens = 2 * BLOCK
    orders = scene.step(a=1)
    assert orders.attachment == attachment(2, b"two")
    assert len(orders.saves) == 2
    assert scene.half.stats.data["store_losses"] == 1


def test_reports_of_a_lost_session_mean_nothing() -> None:
    scene = Scene()
    scene.half.on_new_request(scene.request("a", 1))
    (order,) = scene.step(a=BLOCK).saves
    scene.client.attachment = attachment(2)
    scene.step()
    scene.half.take_report(WorkerReport(saved={order.job: 1}, unready={1: 1}))
    assert scene.client.seals == []
    assert len(scene.step(a=BLOCK).saves) == 1


def test_nothing_is_ordered_while_a_rank_can_t_reach_the_arena() -> None:
    scene = Scene(ranks=2)
    request = scene.request("a", 2)
    scene.half.on_new_request(request)
    scene.step(a=0)
    scene.half.take_report(WorkerReport(unready={1: 1}))
    assert scene.step(a=2 * BLOCK).saves == []
    other = scene.request("b", 2)
    scene.half.on_new_request(other)
    assert scene.half.matched_tokens(other, 0) == (0, False)
    scene.half.take_report(WorkerReport(unready={1: -1}))
    assert len(scene.step(a=2 * BLOCK).saves) == 2


def test_two_requests_with_one_prefix_save_it_once() -> None:
    scene = Scene()
    first, second = scene.request("a", 2), scene.request("b", 3)
    second.block_hashes[:2] = first.block_hashes
    scene.half.on_new_request(first)
    scene.half.on_new_request(second)
    assert len(scene.step(a=2 * BLOCK).saves) == 2
    (order,) = scene.step(b=3 * BLOCK).saves
    assert order.pages == ((3,),)


def test_one_match_per_admission() -> None:
    scene = Scene()
    request = scene.request("a", 3)
    scene.half.on_new_request(request)
    scene.client.matches[0].set_result(Match(epoch=1))
    for _ in range(3):
        assert scene.half.matched_tokens(request, 0) == (0, False)
    assert len(scene.client.matches) == 1
    request.num_preemptions = 1
    assert scene.half.matched_tokens(request, 0) == (None, False)
    assert len(scene.client.matches) == 2


@pytest.mark.parametrize(
    ("directory", "fetch_ms", "wanted"),
    [(True, 500, Fetch(0.5, 8)), (True, 0, None), (False, 500, None)],
)
def test_a_match_may_fetch_where_the_store_has_a_directory(
    directory: bool, fetch_ms: int, wanted: Fetch | None
) -> None:
    scene = Scene(fetch_timeout_ms=fetch_ms)
    scene.client.attachment = replace(attachment(1), directory=directory)
    request = scene.request("a", 5)
    scene.half.on_new_request(request)
    assert scene.client.fetches == [wanted]
    scene.client.matches[0].set_result(replace(answer(3), fetched=2))
    for _ in range(2):  # asked again, as when the GPU has no blocks now
        assert scene.half.matched_tokens(request, 0) == (3 * BLOCK, True)
    assert scene.half.stats.data["fetched_blocks"] == 2
