"""The scheduler half step by step, with a scripted client: what an engine can't be made to do at will.

Sessions are lost between two calls, ranks report at different steps, the store refuses. No engine runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from kvsieve_connector.handoff import MAX_PULLS
from kvsieve_connector.metadata import StepOrders, WorkerReport
from kvsieve_connector.scheduler import SchedulerHalf
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_store.client import Attachment, Match, Pulled, SealEntry, SealResult, SlotRef
from kvsieve_store.errors import CapacityError, SlotNotHeldError, UnavailableError

BLOCK = 4


def attachment(epoch: int, instance: bytes = b"one") -> Attachment:
    return Attachment(
        epoch=epoch,
        instance=instance,
        pool_id=bytes(32),
        extent_bytes=1 << 20,
        segments=(),
        slot_bytes=4096,
        slots_per_extent=8,
        slots_offset=4096,
        lock_path="",
        store_version="0",
        peer_address="10.0.0.7:9400",
    )


@dataclass
class Pull:
    """A pull that was sent. terms: parent, seconds, wait_seconds."""

    source: str
    keys: list[bytes]
    terms: dict[str, Any]
    future: Future[Pulled] = field(default_factory=Future)

    def answer(self, present: int) -> None:
        reason = "" if present == len(self.keys) else "the other store has no more of them"
        self.future.set_result(Pulled(present, present, 0, reason))


@dataclass
class ScriptedClient:
    """Records what is asked; the test answers."""

    attachment: Attachment | None = field(default_factory=lambda: attachment(1))
    slots: list[SlotRef] = field(default_factory=lambda: [SlotRef(i, 1) for i in range(100)])
    matches: list[Future[Match]] = field(default_factory=list)
    seals: list[tuple[list[SealEntry], Future[list[SealResult]]]] = field(default_factory=list)
    leases_back: list[tuple[int, int | None]] = field(default_factory=list)
    slots_back: list[SlotRef] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    holds: list[list[bytes]] = field(default_factory=list)

    def pull_async(self, source: str, keys: Sequence[bytes], **terms: Any) -> Future[Pulled]:
        self.pulls.append(Pull(source, list(keys), terms))
        return self.pulls[-1].future

    def hold_async(self, keys: Sequence[bytes], *, seconds: float) -> Future[int]:
        self.holds.append(list(keys))
        return Future()

    @property
    def credits(self) -> int:
        return len(self.slots)

    def take_credits(self, n: int, *, epoch: int | None = None) -> list[SlotRef]:
        if self.attachment is None or epoch != self.attachment.epoch:
            return []
        taken, self.slots = self.slots[:n], self.slots[n:]
        return taken

    def match_async(self, keys: Sequence[bytes]) -> Future[Match]:
        self.matches.append(Future())
        self.matches[-1].set_running_or_notify_cancel()
        return self.matches[-1]

    def seal_async(self, entries: Sequence[SealEntry], *, epoch: int | None = None) -> Any:
        self.seals.append((list(entries), Future()))
        return self.seals[-1][1]

    def release_async(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> None:
        self.leases_back += [(lease, epoch) for lease in lease_ids]
        self.slots_back += refs


class Scene:
    """A scheduler half, its client, and requests of `blocks` full blocks and one token more."""

    def __init__(self, ranks: int = 1, groups: int = 1) -> None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            kv_events_config=None,
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        )
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
        init_none_hash(sha256)
        caches = SimpleNamespace(kv_cache_groups=[group] * groups, hash_block_size=BLOCK)
        self.half = SchedulerHalf(config, caches, ConnectorSettings(endpoint="unix:///s"))  # type: ignore[arg-type]
        self.client = ScriptedClient()
        self.half.use(self.client)  # type: ignore[arg-type]
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.groups = groups

    def request(self, name: str, blocks: int, tail: int = 1, **params: Any) -> Any:
        """tail: tokens beyond the full blocks. params: kv_transfer_params."""
        self.tables[name] = tuple(list(range(1, blocks + 2)) for _ in range(self.groups))
        return SimpleNamespace(
            request_id=name,
            block_hashes=[f"{name}{i}".encode().ljust(32, b".") for i in range(blocks)],
            num_tokens=blocks * BLOCK + tail,
            num_prompt_tokens=blocks * BLOCK + tail,
            num_computed_tokens=0,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
            kv_transfer_params=params or None,
            all_token_ids=list(range(blocks * BLOCK + tail)),
        )

    def step(self, **tokens: int) -> StepOrders:
        state = SimpleNamespace(resolve_block_ids=self.tables.__getitem__)
        output = SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)
        return self.half.build_orders(output)  # type: ignore[arg-type]

    def blocks(self, name: str) -> Any:
        return SimpleNamespace(get_block_ids=lambda: self.tables[name])


def answer(blocks: int, lease: int = 7, epoch: int = 1) -> Match:
    return Match(tuple(SlotRef(50 + i, 3) for i in range(blocks)), (lease,), epoch)


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
        "kvsieve_pool": bytes(32).hex(),
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


def test_another_pool_is_refused() -> None:
    scene = Scene()
    scene.half.on_new_request(scene.request("a", 2, **SOURCE, kvsieve_pool="ab" * 32))
    assert not scene.client.pulls
    assert scene.half.stats.data["incomplete_handoffs"] == 1
