"""What sparse mode keeps of a request on the GPU, with vLLM's own planner and KV cache manager."""

from __future__ import annotations

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from kvsieve_connector.sparse.spec import main_groups
from tests.engine.sparse_vllm import Engine, new_request, plan_cache, sparse_plan, tokens_of, vllm_config

V32_LAYERS = 61
MEMORY = 20 << 30


def test_the_planner_makes_main_groups_that_fit_the_indexers_page() -> None:
    config = vllm_config(65_536, 512)
    cache = plan_cache(config, V32_LAYERS, MEMORY, sparse_plan())
    assert main_groups(cache) == (0, 1, 2, 3, 4, 5)
    assert [len(group.layer_names) for group in cache.kv_cache_groups] == [11, 10, 10, 10, 10, 10, 61]
    stock = plan_cache(config, V32_LAYERS, MEMORY, None)
    assert cache.num_blocks > 5 * stock.num_blocks


def test_thirty_requests_of_64k_fit_in_20_gib() -> None:
    """DESIGN, numbers to reach: stock vLLM holds 6; at least 30, hot buffers counted."""
    engine = Engine(V32_LAYERS, MEMORY, sparse_plan(), 65_536 + 256, in_flight=512)
    planned = get_max_concurrency_for_kv_cache_config(engine.config, engine.cache)
    while engine.admit(new_request(name := f"r{len(engine.live)}", tokens_of(len(engine.live), 65_536)), 512):
        for step in range(127 + 130):
            engine.save(name)
            assert engine.step(name, 512), (name, step)
            engine.ack(name)
    held = len(engine.live)
    assert held >= 30
    assert planned >= 29.9
    assert engine.residency.host_backed == held
    cap = engine.main[0].max_admission_blocks_per_request
    assert all(count <= cap for name in engine.live for count in engine.pinned(name))
    lost = engine.residency.take_lost()
    assert sum(map(len, lost.values())) > 0
    for name in list(engine.live):
        engine.free(name)
    assert engine.pool.get_num_free_blocks() == engine.free_at_start


def test_stock_vllm_holds_six() -> None:
    config = vllm_config(65_536 + 256, 512)
    cache = plan_cache(config, V32_LAYERS, MEMORY, None)
    assert int(get_max_concurrency_for_kv_cache_config(config, cache)) == 6


def test_a_request_that_begins_with_a_hit_has_no_main_blocks_of_the_hit() -> None:
    engine = Engine(10, 8 << 20, sparse_plan(hot_blocks=2, window_blocks=1), 2048, in_flight=256)
    assert engine.admit(new_request("a", tokens_of(1, 640)), 640, matched=8)
    assert engine.pinned("a") == [2 + 2] * 5
    assert engine.residency.take_backed() == [
        ("a", tuple(tuple(b.block_id for b in m._hot["a"]) for m in engine.main))
    ]
    assert engine.residency.pages == 8
    engine.free("a")
    assert [holding.request_id for holding in engine.ended] == ["a"]
    assert engine.residency.pages == engine.residency.host_backed == 0
    assert engine.pool.get_num_free_blocks() == engine.free_at_start


def test_a_request_becomes_host_backed_when_that_frees_more_than_it_takes() -> None:
    engine = Engine(10, 8 << 20, sparse_plan(hot_blocks=2, window_blocks=1), 2048, in_flight=64)
    assert engine.admit(new_request("a", tokens_of(1, 640)), 64)
    held = [1]
    for _ in range(8):
        engine.save("a")
        engine.ack("a")
        assert engine.step("a", 64)
        held.append(engine.pinned("a")[0])
    # 2 hot blocks in place of 3 old ones, then the window, the block in flight, and the hot blocks.
    assert held == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_nothing_is_released_before_it_is_durable() -> None:
    engine = Engine(10, 8 << 20, sparse_plan(hot_blocks=2, window_blocks=1), 2048, in_flight=64)
    assert engine.admit(new_request("a", tokens_of(1, 640)), 64)
    for _ in range(8):
        engine.save("a")
        assert engine.step("a", 64)
    assert engine.pinned("a") == [9] * 5
    assert engine.residency.waits_for_saves("a")
    engine.ack("a")
    assert engine.step("a", 64)
    assert engine.pinned("a") == [10 - 8 + 2] * 5
    assert not engine.residency.waits_for_saves("a")


def test_tokens_in_flight_keep_their_window() -> None:
    engine = Engine(10, 8 << 20, sparse_plan(hot_blocks=2, window_blocks=1), 2048, in_flight=256)
    request = new_request("a", tokens_of(1, 1024))
    assert engine.admit(request, 640)
    engine.save("a")
    engine.ack("a")
    request.num_in_flight_tokens = 320
    assert engine.step("a", 64)
    assert engine.residency.get("a").limit == 5 - 1


def test_no_more_requests_are_host_backed_than_the_workers_tables_hold() -> None:
    engine = Engine(10, 8 << 20, sparse_plan(hot_blocks=2, window_blocks=1), 2048, in_flight=64)
    engine.residency._max_host_backed = 1
    for name in ("a", "b"):
        assert engine.admit(new_request(name, tokens_of(ord(name), 640)), 512)
        engine.save(name)
        engine.ack(name)
        assert engine.step(name, 64)
    assert [engine.pinned(name)[0] for name in ("a", "b")] == [4, 9]
    assert not engine.residency.has_room(1)
    engine.free("a")
    assert engine.step("b", 64)
    assert engine.pinned("b")[0] == 4
