"""Hand-offs in the scheduler half, with a scripted client: both sides, late, refused and aborted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.v1.request import RequestStatus

from kvsieve_connector.handoff import MAX_PULLS
from kvsieve_connector.metadata import WorkerReport
from kvsieve_store.client import Fetch, SealResult, SlotRef
from kvsieve_store.errors import CapacityError, UnavailableError
from tests.engine.scheduler_script import BLOCK, Scene, answer, attachment

SOURCE = {"do_remote_prefill": True, "kvsieve_store": "10.0.0.8:9400"}


def test_the_last_tokens_of_a_prompt_that_goes_on_elsewhere_are_saved_and_all_is_held() -> None:
    scene = Scene()
    request = scene.request("a", 2, tail=3, do_remote_decode=True)
    scene.half.on_new_request(request)
    first, second = scene.step(a=2 * BLOCK).saves
    request.num_computed_tokens = 2 * BLOCK
    (tail,) = scene.step(a=3).saves
    assert tail.pages == ((3,),)
    params = scene.half.finished(request)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvsieve_store": "10.0.0.7:9400",
        "kvsieve_tokens": 2 * BLOCK + 3,
    }
    scene.half.take_report(WorkerReport(saved={order.job: 1 for order in (first, second, tail)}))
    ((entries, sealed),) = scene.client.seals
    assert [entry.parent for entry in entries] == [b"", entries[0].key, entries[1].key]
    assert scene.client.holds == []  # not before it is sealed
    assert scene.half.has_pending_work()
    sealed.set_result([SealResult.SEALED] * 3)
    scene.step()
    assert scene.client.holds == [[entry.key for entry in entries]]
    assert not scene.half.has_pending_work()


def test_blocks_of_a_prompt_that_goes_on_elsewhere_are_announced_as_they_will_be_sealed() -> None:
    scene = Scene()
    scene.half.on_new_request(scene.request("stays", 2))
    goes = scene.request("goes", 2, tail=3, do_remote_decode=True)
    scene.half.on_new_request(goes)
    orders = [*scene.step(stays=2 * BLOCK, goes=2 * BLOCK).saves[2:]]
    goes.num_computed_tokens = 2 * BLOCK
    orders += scene.step(goes=3).saves
    scene.step()
    assert [len(batch) for batch in scene.client.announced] == [2, 1]
    scene.half.take_report(WorkerReport(saved={order.job: 1 for order in orders}))
    ((sealed, _),) = scene.client.seals
    assert [entry for batch in scene.client.announced for entry in batch] == sealed


def test_nothing_is_announced_to_a_store_that_serves_no_others() -> None:
    scene = Scene()
    assert scene.client.attachment is not None
    scene.client.attachment = replace(scene.client.attachment, peer_address="")
    scene.half.on_new_request(scene.request("a", 2, do_remote_decode=True))
    assert len(scene.step(a=2 * BLOCK).saves) == 2
    assert not scene.client.announced


@pytest.mark.parametrize("tail", [0, 1])
def test_a_prompt_whose_last_token_alone_is_left_has_no_tail(tail: int) -> None:
    scene = Scene()
    request = scene.request("a", 2, tail=tail, do_remote_decode=True)
    scene.half.on_new_request(request)
    assert len(scene.step(a=2 * BLOCK + tail).saves) == 2
    params = scene.half.finished(request)
    assert params is not None
    assert params["kvsieve_tokens"] == 2 * BLOCK


def test_nothing_is_handed_over_by_an_aborted_request_or_a_store_without_peers() -> None:
    scene = Scene()
    request = scene.request("a", 2, do_remote_decode=True)
    scene.half.on_new_request(request)
    scene.step(a=2 * BLOCK)
    request.status = RequestStatus.FINISHED_ABORTED
    assert scene.half.finished(request) is None
    request = scene.request("b", 2, do_remote_decode=True)
    scene.half.on_new_request(request)
    assert scene.client.attachment is not None
    scene.client.attachment = replace(scene.client.attachment, peer_address="")
    assert scene.half.finished(request) is None


def test_a_request_waits_for_its_pull_then_matches_all_but_the_last_token() -> None:
    scene = Scene()
    request = scene.request("a", 2, tail=3, **SOURCE, kvsieve_wait_ms=700)
    scene.half.on_new_request(request)
    (pull,) = scene.client.pulls
    assert (pull.source, len(pull.keys), pull.terms["parent"]) == ("10.0.0.8:9400", 3, b"")
    assert pull.terms["wait_seconds"] == 0.7
    assert scene.half.matched_tokens(request, 0) == (None, False)
    assert not scene.client.matches
    pull.answer(3)
    assert scene.half.matched_tokens(request, 0) == (None, False)
    scene.client.matches[0].set_result(answer(3))
    assert scene.half.matched_tokens(request, BLOCK) == (BLOCK + 2, True)
    scene.half.allocated(request, scene.blocks("a"), BLOCK + 2)
    (order,) = scene.step().loads
    assert order.refs == (SlotRef(51, 3), SlotRef(52, 3))
    assert order.pages == (((2,),), ((3,),))


def test_both_sides_derive_the_same_key_and_other_prompts_another() -> None:
    scene = Scene()
    keys = set()
    for changes in ({}, {"cache_salt": "s"}, {"all_token_ids": [9] * 11}):
        request = scene.request("a", 0, tail=3, **SOURCE)
        vars(request).update(changes)
        scene.half.on_new_request(request)
        keys.add(scene.client.pulls[-1].keys[0])
    assert len(keys) == 3
    scene.half.on_new_request(scene.request("a", 0, tail=3, **SOURCE))
    assert scene.client.pulls[-1].keys[0] in keys


@pytest.mark.parametrize("error", [UnavailableError("gone"), None])
def test_what_has_not_come_is_computed(error: Exception | None) -> None:
    scene = Scene()
    request = scene.request("a", 2, **SOURCE)
    scene.half.on_new_request(request)
    (pull,) = scene.client.pulls
    if error is not None:
        pull.future.set_exception(error)
    else:
        pull.answer(1)
    assert scene.half.matched_tokens(request, 0) == (None, False)
    scene.client.matches[0].set_result(answer(1))
    assert scene.half.matched_tokens(request, 0) == (BLOCK, True)
    assert scene.half.stats.data["incomplete_handoffs"] == 1


def test_a_pull_that_the_store_has_no_room_for_is_sent_again() -> None:
    scene = Scene()
    request = scene.request("a", 2, **SOURCE)
    now = [0.0]
    scene.half._arrivals._clock = lambda: now[0]
    scene.half.on_new_request(request)
    scene.client.pulls[0].future.set_exception(CapacityError("64 are under way"))
    assert scene.half.matched_tokens(request, 0) == (None, False)
    assert len(scene.client.pulls) == 1
    now[0] = 1.0
    assert scene.half.matched_tokens(request, 0) == (None, False)
    scene.client.pulls[1].future.set_exception(CapacityError("64 are under way"))
    now[0] = 1000.0
    scene.half.matched_tokens(request, 0)
    assert scene.client.matches  # the time is over
    assert len(scene.client.pulls) == 2


def test_a_hand_off_goes_before_a_fetch() -> None:
    scene = Scene()
    scene.client.attachment = replace(attachment(1), directory=True)
    request = scene.request("a", 2, **SOURCE)
    scene.half.on_new_request(request)
    assert scene.half.matched_tokens(request, 0) == (None, False)
    assert not scene.client.fetches
    scene.client.pulls[0].answer(1)
    assert scene.half.matched_tokens(request, 0) == (None, False)
    assert scene.client.fetches == [Fetch(2.0, 8)]  # of what has not come


def test_an_aborted_request_ends_its_pull_and_makes_room_for_another() -> None:
    scene = Scene()
    requests = [scene.request(f"r{i}", 1, **SOURCE) for i in range(MAX_PULLS + 1)]
    for request in requests:
        scene.half.on_new_request(request)
    assert len(scene.client.pulls) == MAX_PULLS
    scene.half.finished(requests[0])
    assert scene.client.pulls[0].future.cancelled()
    scene.step()
    assert len(scene.client.pulls) == MAX_PULLS + 1


def test_a_prompt_that_the_gpu_has_waits_for_nothing() -> None:
    scene = Scene()
    request = scene.request("a", 2, **SOURCE)
    scene.half.on_new_request(request)
    scene.half.matched_tokens(request, 2 * BLOCK)
    assert scene.client.pulls[0].future.cancelled()


@pytest.mark.parametrize("pool", ["ab" * 32, "", 7])
def test_which_pool_it_is_the_stores_find_out(pool: object) -> None:
    """Engines of differing TP sizes have differing pools, and their stores know what else differs; an older
    engine names its own."""
    scene = Scene()
    scene.half.on_new_request(scene.request("a", 2, **SOURCE, kvsieve_pool=pool))
    assert len(scene.client.pulls) == 1
