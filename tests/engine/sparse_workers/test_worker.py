"""The worker's half of sparse mode: what becomes of the scheduler's orders, and of arenas whose session is
over. On CPU tensors, with the arena of a real store process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvsieve_connector.metadata import HostBacked, HostBlocks, StepOrders
from kvsieve_connector.sparse import worker as sparse_worker
from kvsieve_connector.sparse.counters import EVERY_STEPS
from kvsieve_store.client import AdminClient, SealEntry, SealResult, SlotRef
from tests.conftest import StoreProcess
from tests.engine.sparse_vllm import BLOCK
from tests.engine.sparse_worker import (
    HOT_BLOCKS,
    LAYERS,
    MAX_MODEL_LEN,
    SEQS,
    Worker,
    backed,
    engine_config,
    forward,
    hot,
    numbered,
    saved,
)
from tests.protocol.client_stores import is_locked, key, until

# Orders


def test_orders_are_on_the_device_when_the_forward_begins(worker: Worker, attach: Any) -> None:
    _, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    worker.half.begin(backed(attachment.epoch, (0, 3), (2, 4)))
    assert not worker.tables.requests.page.any()
    worker.half.prepare_forward(forward(a=(200, 1), b=(7, 1)))
    assert worker.page("a") == [True, False, True] + [False] * 13
    slot = worker.tables.slot("a")
    assert worker.tables.requests.row_slot[:3].tolist() == [slot, worker.tables.sizes.slots, -1]
    assert worker.tables.requests.hot_blocks[:, slot].tolist() == [list(blocks) for blocks in hot(20)]
    arena = worker.half._arena
    assert arena is not None
    assert [list(x) for x in worker.tables.host_pages("a")] == [[0, 2], [arena.address(3), arena.address(4)]]


def test_what_was_saved_is_read_back_through_the_hot_buffer(worker: Worker, attach: Any) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    slot, rows = saved(worker, client, attachment)
    worker.step(backed(attachment.epoch, (1, slot)), a=(200, 1))
    # Layers of different groups share the pool's memory: one must not write to another's hot blocks.
    found = [worker.swap_in(layer, [BLOCK + 3, BLOCK, 2 * BLOCK - 1]) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        assert torch.equal(worker.rows(layer, found[layer]), rows[layer][[3, 0, BLOCK - 1]])


def test_a_request_that_ends_and_starts_anew_in_one_step_has_new_tables(worker: Worker, attach: Any) -> None:
    _, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    worker.step(backed(attachment.epoch, (0, 1), (1, 2)), a=(200, 1))
    orders = backed(attachment.epoch, (2, 3), first=40)
    orders.host_ended.append("a")
    worker.step(orders, a=(200, 1))
    assert worker.page("a") == [False, False, True] + [False] * 13
    slot = worker.tables.slot("a")
    assert worker.tables.requests.hot_blocks[0, slot].tolist() == list(hot(40)[0])
    worker.step(StepOrders(host_ended=["a"]))
    assert worker.tables.slot("a") == -1
    assert worker.tables.requests.row_slot.eq(-1).all()


def test_steps_without_a_forward_take_orders_too(worker: Worker, attach: Any) -> None:
    _, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    worker.step(backed(attachment.epoch, (0, 1)))
    assert worker.page("a")[0]
    assert not worker.runtime.reads_host


# Sessions that are over


def test_an_arena_is_read_and_locked_until_its_epoch_is_forgotten(worker: Worker, attach: Any) -> None:
    client, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    slot, rows = saved(worker, client, attachment)
    worker.step(backed(attachment.epoch, (0, slot)), a=(200, 1))
    worker.step(StepOrders(detach=True), a=(201, 1))
    assert is_locked(attachment.lock_path)
    assert torch.equal(worker.read(0, [9]), rows[0][[9]])
    worker.step(StepOrders(host_blocks=[HostBlocks("a", attachment.epoch, ((1, slot),))]), a=(202, 1))
    assert torch.equal(worker.read(1, [BLOCK + 9]), rows[1][[9]])
    worker.step(StepOrders(host_ended=["a"]))
    assert is_locked(attachment.lock_path)
    worker.step(StepOrders(forget_epochs=[attachment.epoch]))
    until(lambda: not is_locked(attachment.lock_path))


def test_saves_fail_between_two_sessions(worker: Worker, attach: Any) -> None:
    _, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    worker.step(StepOrders(detach=True))
    worker.step(worker.save(5, 1))
    report = worker.half.report()
    assert report is not None
    assert (report.saved, report.failed) == ({}, {1: 1})


def test_requests_read_the_arenas_of_two_sessions(worker: Worker, attach: Any) -> None:
    client, first = attach()
    worker.step(StepOrders(attachment=first))
    slot, rows = saved(worker, client, first)
    worker.step(backed(first.epoch, (0, slot)), a=(200, 1))
    client.close()
    client, second = attach()
    second = numbered(second, first.epoch + 1)
    worker.step(StepOrders(attachment=second), a=(201, 1))
    assert is_locked(first.lock_path)
    assert is_locked(second.lock_path)
    (ref,) = client.take_credits(1)
    worker.caches["layers.0.attn"][5] = 7
    worker.step(worker.save(5, ref.slot))
    worker.step(StepOrders(host_blocks=[HostBlocks("a", second.epoch, ((1, ref.slot),))]), a=(202, 1))
    found = worker.read(0, [0, BLOCK])
    assert torch.equal(found[0], rows[0][0])
    assert found[1].eq(7).all()
    worker.step(StepOrders(host_ended=["a"], forget_epochs=[first.epoch]))
    until(lambda: not is_locked(first.lock_path))
    assert is_locked(second.lock_path)
    worker.step(backed(second.epoch, (0, ref.slot), name="b", first=40), b=(200, 1))
    assert worker.read(0, [0]).eq(7).all()


def test_the_same_store_attached_anew_is_ready_at_once(worker: Worker, attach: Any) -> None:
    """Whether or not a step came in between, and nobody read the old session's slots."""
    client, first = attach()
    worker.step(StepOrders(attachment=first))
    found, memory = addresses(worker), worker.half._arena.memory
    client.close()
    worker.step(StepOrders(detach=True))
    worker.step(StepOrders(forget_epochs=[first.epoch]))
    assert not os.path.exists(first.lock_path) or not is_locked(first.lock_path)
    client, second = attach()
    worker.step(StepOrders(attachment=numbered(second, first.epoch + 1)))
    assert (addresses(worker), worker.half._arena.memory) == (found, memory)
    assert worker.half.report() is None
    client.close()
    _, third = attach()
    worker.step(StepOrders(attachment=numbered(third, first.epoch + 2), forget_epochs=[first.epoch + 1]))
    assert (addresses(worker), worker.half._arena.memory) == (found, memory)


def test_slots_that_are_read_are_not_given_away_though_the_next_session_has_their_memory(
    worker: Worker, store: StoreProcess, attach: Any
) -> None:
    """One is sealed and leased, one was not sealed yet when the session was lost. The next session takes all
    that the store gives, and overwrites it."""
    client, first = attach()
    worker.step(StepOrders(attachment=first))
    slot, rows = saved(worker, client, first)
    loose, loose_rows = saved(worker, client, first)
    ref = SlotRef(slot, worker.half._arena.generation(slot))
    assert client.seal([SealEntry(key(1), b"", ref)], hold=True).results == [SealResult.SEALED]
    worker.step(backed(first.epoch, (0, slot), (1, loose)), a=(200, 1))
    found = addresses(worker)
    client.close()
    client, second = attach()
    second = numbered(second, first.epoch + 1)
    worker.step(StepOrders(attachment=second), a=(201, 1))
    assert addresses(worker) == found
    # A session that nobody locks comes and goes: the store has looked at all locks since.
    attach()[0].close()
    with AdminClient(store.endpoint) as admin:
        until(lambda: sorted(s.state for s in admin.list_sessions().sessions) == ["attached", "fencing"])

    def take_all() -> set[int]:
        client.reserve(second.slots)
        refs = client.take_credits(second.slots)
        for ref in refs:
            worker.half._arena.slot(ref.slot)[:] = 0xEE
        return {ref.slot for ref in refs}

    taken = take_all()
    assert len(taken) > 100
    assert not taken & {slot, loose}
    assert torch.equal(worker.read(0, [9]), rows[0][[9]])
    assert torch.equal(worker.read(1, [BLOCK + 9]), loose_rows[1][[9]])
    worker.step(StepOrders(host_ended=["a"], forget_epochs=[first.epoch]))
    until(lambda: taken.update(take_all()) or {slot, loose} <= taken)


def addresses(worker: Worker) -> list[int]:
    return [int(segment.ctypes.data) for segment in worker.half._arena.segments]


def test_blocks_of_an_arena_that_nobody_has_mapped_are_refused(worker: Worker, attach: Any) -> None:
    _, attachment = attach()
    worker.step(StepOrders(attachment=attachment))
    with pytest.raises(AssertionError, match="an arena that is not mapped"):
        worker.half.begin(backed(attachment.epoch + 1, (0, 1)))


def test_nothing_is_held_after_the_end(worker: Worker, attach: Any) -> None:
    client, first = attach()
    worker.step(StepOrders(attachment=first))
    client.close()
    _, second = attach()
    worker.step(StepOrders(attachment=numbered(second, first.epoch + 1)))
    impl = worker.half._vllm_config.compilation_config.static_forward_context["layers.0.attn"].impl
    assert impl.host is worker.runtime.layers["layers.0.attn"]
    worker.half.close()
    assert not is_locked(first.lock_path)
    assert not is_locked(second.lock_path)
    assert impl.host is None


# The runner


@pytest.mark.parametrize(("own", "before"), [(None, LAYERS), (LAYERS, LAYERS), (LAYERS - 1, LAYERS - 1)])
def test_a_drafters_layers_are_those_past_the_models(
    make: Callable[..., Worker], own: int | None, before: int
) -> None:
    worker = make(num_hidden_layers=own)
    assert worker.runtime._model_layers == before
    assert len(worker.runtime.layers) == LAYERS


@pytest.mark.parametrize("step", [{"forward_context": 1}, {"request_ids": ["a"]}, {"scheduler_output": 1}])
def test_a_runner_that_does_not_tell_its_batch_is_refused(worker: Worker, step: dict[str, Any]) -> None:
    with pytest.raises(
        RuntimeError, match=rf"needs vLLM's V2 model runner; .* only \['{next(iter(step))}'\]"
    ):
        worker.half.prepare_forward(step)


def test_the_batch_is_in_row_order(worker: Worker) -> None:
    step = forward(c=(0, 64), b=(640, 1), a=(300, 2))
    step["request_ids"] = ["a", "b", "c"]
    rows = sparse_worker.batch_rows(step["request_ids"], step["scheduler_output"])
    assert [(row.req_id, row.computed, row.scheduled) for row in rows] == [
        ("a", 300, 2),
        ("b", 640, 1),
        ("c", 0, 64),
    ]


@pytest.mark.parametrize(("engines", "cleared"), [(1, False), (2, True)])
def test_rows_are_cleared_where_an_idle_engine_replays_graphs(
    make: Callable[..., Worker], engines: int, cleared: bool
) -> None:
    """After the drafter, if there is one: it reads the rows, too."""
    worker = make(data_parallel_size=engines)
    worker.half.begin(StepOrders(host_backed=[HostBacked("a", hot(20))]))
    worker.half.prepare_forward(forward(a=(64, 1)))
    worker.half.finish_saves(after_sampling=False)
    assert not worker.tables.requests.row_slot.eq(-1).all()
    worker.half.finish_saves(after_sampling=True)
    assert worker.tables.requests.row_slot.eq(-1).all() == cleared


def test_counters_go_to_the_metrics_now_and_then(worker: Worker) -> None:
    worker.step(StepOrders(host_backed=[HostBacked("a", hot(20))]), a=(64, 1))
    worker.swap_in(0, [1, 2, 3])
    for _ in range(EVERY_STEPS):
        worker.step(None, a=(64, 1))
    stats = worker.half.stats.take()
    assert stats is not None
    assert (stats.data["asked_rows"], stats.data["gpu_rows"]) == (3, 3)


# Sizes


def test_tables_have_room_for_what_the_scheduler_may_order(worker: Worker) -> None:
    sizes = worker.tables.sizes
    assert sizes.blocks * BLOCK >= MAX_MODEL_LEN
    assert sizes.pages == worker.cache.num_blocks + 1
    assert (sizes.groups, sizes.layers, sizes.hot_blocks) == (LAYERS, LAYERS, HOT_BLOCKS)
    assert sizes.slots == worker.plan.table_slots(worker.cache.num_blocks, LAYERS, SEQS)
    assert worker.runtime.workspace_rows >= MAX_MODEL_LEN


@pytest.mark.parametrize(("graphs", "rows"), [([1, 2, 8], 8), ([1, 2], SEQS), ([], SEQS), (None, SEQS)])
def test_rows_are_those_of_the_largest_batch_padding_included(
    worker: Worker, graphs: list[int] | None, rows: int
) -> None:
    config = engine_config(graphs=graphs)
    assert sparse_worker.table_sizes(config, worker.cache, worker.plan, LAYERS).rows == rows


@pytest.mark.parametrize(
    ("indexers", "prefetch", "name"),
    [
        ([0, 1, 2, 3], None, "previous-step"),
        ([0, 2], None, "index-share"),
        ([0, 2], "none", "none"),
    ],
)
def test_the_policy_follows_from_who_has_an_indexer(
    make: Callable[..., Worker], indexers: list[int], prefetch: str | None, name: str
) -> None:
    worker = make(indexers=indexers, prefetch=prefetch)
    policy = worker.half._policy(list(worker.runtime.layers))
    assert policy.name == name
    shares = [[p.layer for p in step if p.source == "leader"] for step in policy.steps]
    assert shares == ([[], [0], [], [2]] if name == "index-share" else [[]] * LAYERS)
