"""The scheduler half in sparse mode, case by case; the last ones with a real store process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvsieve_connector.metadata import StepOrders
from tests.conftest import StoreProcess
from tests.engine.sparse_process import RealArenas, close, connect
from tests.engine.sparse_scene import Scene
from tests.engine.sparse_store import FakeClient, FakeStore
from tests.engine.sparse_vllm import new_request, tokens_of
from tests.fault.proxy import Proxy


def scene(slots: int = 200, target: int = 16, **options: Any) -> Scene:
    store = FakeStore(slots)
    return Scene(FakeClient(store, target), {1: store.arena}, **options)


def told(orders: list[StepOrders]) -> list[tuple[str, int]]:
    """(request, block) of all that is read from the arena, in the order of the orders."""
    return [(host.req_id, index) for o in orders for host in o.host_blocks for index, _ in host.blocks]


def stat(engine: Scene, name: str) -> float:
    return engine.half.stats.data.get(name, 0)


def test_a_long_prompt_becomes_host_backed_and_loses_blocks_to_others() -> None:
    engine = scene(pool_mib=10)
    engine.submit(new_request("a", tokens_of(1, 1000), 200))
    for _ in range(8):
        engine.step()
    (backed,) = [b for o in engine.orders for b in o.host_backed]
    assert (backed.req_id, [len(group) for group in backed.hot_blocks]) == ("a", [2] * 5)
    assert told(engine.orders) == []
    engine.submit(new_request("b", tokens_of(2, 1000), 20))
    engine.run()
    lost = told(engine.orders)
    assert ("a", 0) in lost
    assert len(lost) == len(set(lost)) == stat(engine, "lost_blocks")
    assert [name for o in engine.orders for name in o.host_ended] == ["b", "a"]
    engine.check_empty()


def test_a_hit_is_loaded_as_indexer_blocks_only_and_read_from_the_arena() -> None:
    engine = scene()
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    engine.manager.reset_prefix_cache()
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    before = len(engine.orders)
    engine.run()
    (load,) = [order for o in engine.orders for order in o.loads]
    assert (load.req_id, len(load.refs)) == ("b", 10)
    assert all(pages[engine.indexers[0]][0] and not pages[0][0] for pages in load.pages)
    assert told(engine.orders[before:]) == [("b", index) for index in range(10)]
    assert stat(engine, "matched_blocks") == 10


def test_a_local_hit_needs_no_load_but_is_read_from_the_arena() -> None:
    engine = scene()
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    engine.run()
    assert not any(o.loads for o in engine.orders)
    assert told(engine.orders) == [("b", index) for index in range(10)]


def test_a_local_hit_that_the_store_has_lost_is_evicted_and_computed() -> None:
    engine = scene()
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    store = engine.client.store
    for key in list(store.sealed)[6:]:
        store.free.append(store.sealed.pop(key))
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    engine.run()
    assert stat(engine, "evicted_hits") == 4
    assert told(engine.orders) == [("b", index) for index in range(6)]
    assert stat(engine, "saved_blocks") == 10 + 4


def test_a_hit_on_blocks_that_are_on_their_way_to_the_store_waits_for_them() -> None:
    engine = scene(late=2)
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 80))
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    engine.run()
    assert told(engine.orders)[:10] == [("b", index) for index in range(10)]
    assert stat(engine, "evicted_hits") == 0
    assert stat(engine, "saved_blocks") == 10 + 1


def test_without_a_store_all_blocks_stay_and_hits_are_computed() -> None:
    engine = scene(pool_mib=24)
    engine.half.use(None)
    for name in ("a", "b"):
        engine.submit(new_request(name, [*tokens_of(1, 640), ord(name)], 4))
        engine.run()
    assert not any(o.saves or o.host_backed or o.host_blocks for o in engine.orders)
    assert stat(engine, "evicted_hits") == 10
    assert not engine.half.has_pending_block_frees()
    engine.check_empty()


def test_a_request_saves_its_own_copy_of_a_block_that_another_saves() -> None:
    engine = scene()
    for name in ("a", "b"):
        request = new_request(name, [*tokens_of(1, 640), ord(name)], 30)
        request.skip_reading_prefix_cache = True
        engine.submit(request)
    engine.run()
    assert stat(engine, "duplicate_blocks") == 10
    engine.client.tick()
    store = engine.client.store
    assert not store.leases
    assert len(store.granted) == engine.client.credits


@pytest.mark.parametrize("overlap", [1, 2])
def test_the_store_gets_nothing_back_while_a_step_may_read_it(overlap: int) -> None:
    engine = scene(overlap=overlap)
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    while "a" not in engine.done:
        engine.step()
    assert engine.orders[-1].host_ended == ["a"]
    assert [len(slots) for slots in engine.client.store.leases.values()] == [10]
    for _ in range(overlap - 1):
        assert engine.half.has_pending_work()
        engine.step()
        assert [len(slots) for slots in engine.client.store.leases.values()] == [10]
    engine.run()
    engine.client.tick()
    assert not engine.client.store.leases


def test_a_request_has_one_lease_however_long_it_decodes() -> None:
    engine = scene(slots=400)
    for name in ("a", "b"):
        engine.submit(new_request(name, [*tokens_of(1, 640), ord(name)], 1000))
        for _ in range(20):
            engine.step()
    while engine.running:
        engine.step()
        assert len(engine.client.store.leases) <= 2
        most = max((len(slots) for slots in engine.client.store.leases.values()), default=0)
        assert most <= 25
    assert most > 20
    engine.run()
    engine.client.tick()
    assert not engine.client.store.leases


def test_a_failed_load_is_computed() -> None:
    engine = scene()
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    engine.manager.reset_prefix_cache()
    engine.fail_loads.add("b")
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    engine.run()
    assert [name for o in engine.orders for name in o.host_ended] == ["a", "b", "b"]
    assert stat(engine, "saved_blocks") == 10
    assert stat(engine, "duplicate_blocks") == 10
    engine.check_empty()


def test_a_request_waits_for_slots_and_is_not_overtaken() -> None:
    engine = scene(slots=32, target=4, max_model_len=1600)
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 500))
    engine.step()
    engine.step()
    engine.submit(new_request("b", tokens_of(2, 1400), 100), new_request("c", tokens_of(3, 64), 4))
    while "b" not in [request.request_id for request in engine.running]:
        engine.step()
        assert "c" not in [request.request_id for request in engine.running]
    assert engine.done == ["a"]
    assert stat(engine, "slot_waits") >= 1
    engine.run()
    engine.check_empty()


def test_others_pass_a_request_that_the_arena_has_no_room_for() -> None:
    store = FakeStore(slots=32)
    engine = Scene(FakeClient(store, 4), {1: store.arena}, max_model_len=1600)
    pinned = dict.fromkeys((store.free.pop() for _ in range(16)), engine.client)
    store.granted |= pinned
    big, small = new_request("big", tokens_of(1, 1400), 100), new_request("small", tokens_of(2, 300), 10)
    engine.submit(big, small)
    while engine.done != ["small"]:
        engine.step()
        assert engine.steps < 3000
    assert engine.waiting == [big]
    for slot in pinned:
        del store.granted[slot]
        store.free.append(slot)
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("waits", [True, False])
def test_running_requests_are_not_preempted_while_their_copies_are_under_way(waits: bool) -> None:
    engine = scene(pool_mib=7, late=3, seed=3)
    if not waits:
        engine.half.has_pending_block_frees = lambda: False  # type: ignore[method-assign]
    for i in range(3):
        engine.submit(new_request(f"r{i}", tokens_of(i, 700), 150))
    engine.run()
    assert (engine.preempted == 0) == waits


def test_a_store_with_too_few_slots_for_one_request_is_refused() -> None:
    engine = scene(slots=20)
    with pytest.raises(ValueError, match=r"max_model_len=2048 tokens fills 32 slots, .* room for 20; give"):
        engine.half.check_attachment(engine.client.attachment)


def test_such_a_store_that_comes_after_the_start_is_not_used() -> None:
    engine = scene(slots=20)
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    assert not any(o.attachment or o.saves for o in engine.orders)
    engine.client.attach(FakeStore(100))
    engine.arenas[2] = engine.client.store.arena
    engine.submit(new_request("b", [*tokens_of(2, 640), 1], 4))
    engine.run()
    assert stat(engine, "saved_blocks") == 10


def test_requests_read_the_arena_of_a_lost_session_until_they_end() -> None:
    engine = scene(pool_mib=8)
    engine.submit(new_request("a", tokens_of(1, 1000), 300), new_request("b", tokens_of(2, 1000), 10))
    while stat(engine, "lost_blocks") < 4:
        engine.step()
    engine.client.lose()
    engine.step()
    assert engine.orders[-1].detach
    engine.client.attach(FakeStore(200))
    engine.arenas[2] = engine.client.store.arena
    engine.submit(new_request("c", tokens_of(3, 1000), 200))
    engine.run()
    epochs = {(host.req_id, host.epoch) for o in engine.orders for host in o.host_blocks}
    assert ("a", 1) in epochs
    assert [epoch for o in engine.orders for epoch in o.forget_epochs] == [1]
    engine.check_empty()


def test_a_request_that_needs_the_store_waits_for_one_and_others_go_first() -> None:
    engine = scene(pool_mib=8)
    client = engine.client
    engine.half.use(None)
    engine.submit(new_request("a", tokens_of(1, 1900), 20), new_request("b", tokens_of(2, 300), 20))
    for _ in range(100):
        engine.step()
    assert engine.done == ["b"]
    assert engine.preempted == 0
    engine.half.use(client, client.target)
    engine.run()
    assert engine.done == ["b", "a"]
    engine.check_empty()


@pytest.mark.parametrize("overlap", [1, 2])
def test_nothing_is_read_from_an_arena_that_the_workers_do_not_reach_yet(overlap: int) -> None:
    """They pin it in the background, and say so after the step that tells them of it."""
    engine = scene(overlap=overlap)
    engine.submit(new_request("a", [*tokens_of(1, 640), 1], 4))
    engine.run()
    engine.client.lose()
    engine.step()
    engine.client.attach(engine.client.store)
    engine.arenas[2] = engine.client.store.arena
    engine.submit(new_request("b", [*tokens_of(1, 640), 2], 4))
    engine.client.tick()
    before = len(engine.orders)
    while not engine.done.count("b"):
        engine.step()
        if engine.orders[-1].attachment is not None:
            engine.in_flight[-1].report.unready[2] = 1
        assert engine.steps < 100
    assert told(engine.orders[before:]) == []
    assert not any(o.loads for o in engine.orders[before:])
    engine.in_flight[-1].report.unready[2] = -1
    engine.run()
    engine.submit(new_request("c", [*tokens_of(1, 640), 3], 4))
    engine.run()
    assert told(engine.orders[before:]) == [("c", index) for index in range(10)]


# With a real store


@pytest.fixture
def attach() -> Iterator[Callable[..., Scene]]:
    """An engine on a store process."""
    opened: list[Scene] = []

    def start(store: StoreProcess | Proxy, **options: Any) -> Scene:
        client = connect(store)
        opened.append(Scene(client, RealArenas(client), **options))
        return opened[-1]

    yield start
    for scene in opened:
        close(scene)


def metric(store: StoreProcess, name: str) -> float:
    return sum(float(line.split()[-1]) for line in store.metrics().splitlines() if line.startswith(name))


def test_a_real_store_keeps_what_is_read_and_gets_all_of_it_back(
    start_store: Callable[..., StoreProcess], attach: Callable[..., Scene]
) -> None:
    store = start_store("--pool-size", "64MiB")
    engine = attach(store, pool_mib=9, max_model_len=1600)
    engine.half.check_attachment(engine.client.attachment)
    for i in range(8):
        engine.submit(new_request(f"r{i}", [*tokens_of(i % 4, 900), i], 80))
        if i == 3:
            engine.run(20_000)
    engine.run(20_000)
    engine.check_empty()
    assert stat(engine, "lost_blocks") > 0
    assert stat(engine, "matched_blocks") > 0
    deadline = time.monotonic() + 20
    while metric(store, "kvsieve_leases") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(store, "kvsieve_leases") == 0


def test_a_real_store_dies_and_another_takes_its_place(
    start_store: Callable[..., StoreProcess], attach: Callable[..., Scene]
) -> None:
    store = start_store("--pool-size", "64MiB")
    engine = attach(store, pool_mib=8, max_model_len=1600)
    engine.submit(new_request("a", tokens_of(1, 1000), 400), new_request("b", tokens_of(2, 1000), 40))
    while stat(engine, "lost_blocks") < 4:
        engine.step()
    store.kill()
    while not any(o.detach for o in engine.orders):
        engine.step()
    store.start()
    while engine.client.attachment is None:
        engine.step()
    engine.submit(new_request("c", tokens_of(3, 1000), 40))
    engine.run(20_000)
    engine.check_empty()
    assert sorted(engine.done) == ["a", "b", "c"]
    assert [epoch for o in engine.orders for epoch in o.forget_epochs] == [1]


def test_a_connection_breaks_and_what_is_read_stays_while_others_fill_the_arena(
    start_store: Callable[..., StoreProcess], attach: Callable[..., Scene]
) -> None:
    """Requests of the next session write more than the arena holds, in memory that the first one reads."""
    store = start_store("--pool-size", "64MiB")
    with Proxy(store.endpoint) as proxy:
        engine = attach(proxy, pool_mib=8, max_model_len=1600)
        engine.submit(new_request("a", tokens_of(1, 1000), 500), new_request("b", tokens_of(2, 1000), 40))
        while stat(engine, "lost_blocks") < 4:
            engine.step()
        proxy.cut()
        while not any(o.detach for o in engine.orders):
            engine.step()
        proxy.mend()
        while engine.client.attachment is None:
            engine.step()
        saved = stat(engine, "saved_blocks")
        for n in range(12):
            engine.submit(new_request(f"c{n}", tokens_of(10 + n, 1000), 20))
        engine.run(40_000)
        engine.check_empty()
        assert stat(engine, "saved_blocks") - saved > engine.client.attachment.slots
        epochs = {(host.req_id, host.epoch) for o in engine.orders for host in o.host_blocks}
        assert ("a", 1) in epochs
        assert [epoch for o in engine.orders for epoch in o.forget_epochs] == [1]
        # All that the first session had has come back.
        deadline = time.monotonic() + 20
        while metric(store, "kvsieve_fencing_sessions") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(store, "kvsieve_fencing_sessions") == 0
