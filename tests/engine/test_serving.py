"""What real serving does to the connector: salts, preemption, aborts, several engines, a full store."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve_store.client.admin import AdminClient
from tests.conftest import StoreProcess
from tests.engine.generate import connector_of, counters, generate, prompt, seals_done

Engine = Callable[..., AbstractContextManager[Any]]
BLOCK = 32


def test_loaded_pages_are_the_bytes_that_were_saved(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """Every page of every layer, byte for byte, through save, seal, match and load."""
    ids = prompt(700, 1)
    with engine(tiny_qwen3, store.endpoint) as llm:
        before = pages_after(llm, ids)
    with engine(tiny_qwen3, store.endpoint) as llm:
        after = pages_after(llm, ids)
        assert generate(llm, [ids])[0].cached > 0
    for name, saved in before.items():
        assert np.array_equal(saved, after[name]), name


def pages_after(llm: Any, ids: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Runs a prompt; the pages of its full blocks, layer name -> uint8 [blocks, page_bytes]."""
    scheduler = connector_of(llm)._scheduler
    used: list[tuple[int, ...]] = []
    finished = scheduler.finished
    manager = connector_of(llm)._kv_cache_manager

    def note(request: Any) -> None:
        used.extend(zip(*manager.get_block_ids(request.request_id), strict=True))
        finished(request)

    scheduler.finished = note
    generate(llm, [ids], max_tokens=2)
    seals_done(llm)
    blocks = [b for (b,) in used[: (len(ids) - 1) // BLOCK]]
    layers = connector_of(llm, "worker")._worker._engine.layers
    return {layer.name: layer.view[blocks].numpy().copy() for layer in layers}


def test_layers_done_says_that_all_layers_have_landed(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [prompt(300)])
        seals_done(llm)
        worker = connector_of(llm, "worker")._worker
        with AdminClient(store.endpoint) as admin:
            pool = admin.list_pools().pools[0].name
            blocks = admin.list_blocks(pool).blocks
        layers = len(worker._engine.layers)
        assert len(blocks) == 9
        assert {worker._arena.layers_done(b.slot, 0) for b in blocks} == {layers}
        assert {worker._arena.generation(b.slot) for b in blocks} == {b.generation for b in blocks}


def test_layers_are_copied_while_the_forward_runs(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """The first layer's bytes are there before the last layer has run."""
    seen: list[tuple[int, int]] = []
    with engine(tiny_qwen3, store.endpoint) as llm:
        worker = connector_of(llm, "worker")._worker
        copies = worker._engine
        save_layer = copies.save_layer

        def watch(index: int, orders: Any) -> int:
            if orders:
                seen.append((index, worker._arena.layers_done(orders[0].slot, 0)))
            return save_layer(index, orders)

        copies.save_layer = watch
        generate(llm, [prompt(100)], max_tokens=1)
    assert seen == [(i, i) for i in range(len(copies.layers))]


def test_cache_salt_separates_tenants(engine: Engine, store: StoreProcess, tiny_qwen3: Path) -> None:
    ids = prompt(500)
    salted = {"prompt_token_ids": ids, "cache_salt": "tenant-a"}
    other = {"prompt_token_ids": ids, "cache_salt": "tenant-b"}
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [salted])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint) as llm:
        assert [a.cached for a in generate(llm, [other])] == [0]
        assert [a.cached for a in generate(llm, [ids])] == [0]
        assert [a.cached for a in generate(llm, [salted])] == [480]


def test_local_hits_come_first_and_the_store_adds_to_them(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    long = prompt(800)
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [long])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint, disable_log_stats=False) as llm:
        assert generate(llm, [long[:320]])[0].cached == 288
        assert generate(llm, [long])[0].cached == 768
        # 9 blocks for the first; the second finds 10 in the engine and loads what lies beyond.
        assert counters(llm)["loaded_blocks"] == 9 + 24 - 10


def test_two_engines_share_prefixes_while_both_run(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """The second engine, a process of its own, is there before the first saves; it finds the prefixes."""
    script = Path(__file__).parent / "answer.py"
    ids = [prompt(600, seed) for seed in range(3)]
    with engine(tiny_qwen3, store.endpoint, dtype="float32") as first:
        command = [sys.executable, str(script), str(tiny_qwen3), store.endpoint]
        second = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert second.stdin is not None
            assert second.stdout is not None
            assert any(line == "ready\n" for line in second.stdout)
            with AdminClient(store.endpoint) as admin:
                assert [s.state for s in admin.list_sessions().sessions] == ["attached"] * 2
            saved = generate(first, ids)
            seals_done(first)
            json.dump(ids, second.stdin)
            second.stdin.close()
            (line,) = (line for line in second.stdout if line.startswith("["))
        finally:
            second.kill()
            second.wait()
    for answer, (tokens, cached) in zip(saved, json.loads(line), strict=True):
        assert cached == 576
        assert answer.tokens == tuple(tokens)


def test_preempted_requests_come_back_from_the_store(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    """A paged cache too small for all: requests are preempted, resume, and answer as without a connector."""
    ids = [prompt(400, seed) for seed in range(6)]
    small = {"num_gpu_blocks_override": 48, "max_model_len": 1024, "enable_prefix_caching": False}
    small["dtype"] = "float32"  # preemption changes the batches, and bfloat16 rounds with them
    with engine(tiny_qwen3, **small) as llm:
        plain = generate(llm, ids, max_tokens=150)
    with engine(tiny_qwen3, store.endpoint, disable_log_stats=False, **small) as llm:
        answers = generate(llm, ids, max_tokens=150)
        preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted > 0
        assert counters(llm)["loaded_blocks"] > 0
        assert counters(llm)["failed_loads"] == 0
        assert not connector_of(llm)._scheduler._requests
    assert [a.tokens for a in answers] == [a.tokens for a in plain]


def test_aborted_requests_leave_no_lease(engine: Engine, store: StoreProcess, tiny_qwen3: Path) -> None:
    from vllm import SamplingParams

    ids = prompt(1500)
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [ids])
        seals_done(llm)
    with engine(tiny_qwen3, store.endpoint) as llm:
        engine_core = llm.llm_engine
        for number in range(12):
            engine_core.add_request(
                f"r{number}", {"prompt_token_ids": ids}, SamplingParams(max_tokens=50, ignore_eos=True)
            )
            for _ in range(number % 4):  # abort before, while and after the load
                engine_core.step()
            engine_core.abort_request([f"r{number}"])
        while engine_core.has_unfinished_requests():
            engine_core.step()
        generate(llm, [prompt(40)])
        half = connector_of(llm)._scheduler
        assert not half._requests
        assert not half._loads
        with AdminClient(store.endpoint) as admin:
            wait_for(lambda: admin.status().leases == 0)
        assert generate(llm, [ids])[0].cached > 0


def test_a_store_without_free_slots_costs_saves_only(
    engine: Engine, start_store: Callable[..., StoreProcess], tiny_qwen3: Path
) -> None:
    """Everything is pinned: nothing can be saved, requests go on, the skipped saves are counted."""
    store = start_store("--pool-size", "16MiB", "--extent-size", "2MiB", "--segment-size", "4MiB")
    with engine(tiny_qwen3, store.endpoint, disable_log_stats=False, kvsieve={"credits": 16}) as llm:
        with AdminClient(store.endpoint) as admin:
            seed = 0
            while True:  # fill the arena, then pin what is there
                generate(llm, [prompt(1500, seed)], max_tokens=1)
                seals_done(llm)
                seed += 1
                pool = admin.list_pools().pools[0]
                if pool.owned_bytes == 16 << 20:
                    break
            keys = [b.key for b in all_blocks(admin, pool.name)]
            admin.pin(pool.name, b"".join(keys))
        for extra in range(4):
            generate(llm, [prompt(1500, 100 + extra)], max_tokens=1)
        assert counters(llm)["skipped_saves"] > 0
        assert generate(llm, [prompt(300, 77)])[0].tokens


def test_kv_events_tell_what_was_stored(engine: Engine, store: StoreProcess, tiny_qwen3: Path) -> None:
    """Every sealed block once, with its tokens and its parent; also of requests that end at once."""
    from vllm.config import KVEventsConfig

    ids = [prompt(300, 9), prompt(100, 5)]
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    events: list[Any] = []
    with engine(tiny_qwen3, store.endpoint, kv_events_config=config) as llm:
        half = connector_of(llm)._scheduler
        take = half.take_events
        half.take_events = lambda: events.extend(got := take()) or got
        generate(llm, ids, max_tokens=1)
        seals_done(llm)
        events.extend(take())
    assert {e.medium for e in events} == {"CPU"}
    stored = {tuple(e.token_ids): e for e in events}
    expected = [tuple(tokens[i : i + BLOCK]) for tokens in ids for i in range(0, len(tokens) - BLOCK, BLOCK)]
    assert len(events) == len(expected)
    assert set(stored) == set(expected)
    chain = [stored[tuple(ids[0][i : i + BLOCK])] for i in range(0, 300 - BLOCK, BLOCK)]
    assert chain[0].parent_block_hash is None
    for parent, child in itertools.pairwise(chain):
        assert [child.parent_block_hash] == parent.block_hashes


def test_generated_blocks_are_saved_unless_told_otherwise(
    engine: Engine, start_store: Callable[..., StoreProcess], tiny_qwen3: Path
) -> None:
    for save_decode, blocks in ((True, 6), (False, 3)):
        store = start_store()
        with engine(tiny_qwen3, store.endpoint, kvsieve={"save_decode": save_decode}) as llm:
            generate(llm, [prompt(100)], max_tokens=100)
            seals_done(llm)
            with AdminClient(store.endpoint) as admin:
                assert admin.status().sealed_blocks == blocks


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"endpont": "x"}, r"unknown key kvsieve\.endpont; did you mean kvsieve\.endpoint"),
        ({"mode": "turbo"}, r"kvsieve\.mode"),
        ({"match_timeout_ms": 0}, r"kvsieve\.match_timeout_ms"),
    ],
)
def test_bad_settings_stop_the_start(
    extra: dict[str, Any], says: str, engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    with pytest.raises(ValueError, match=says), engine(tiny_qwen3, store.endpoint, kvsieve=extra):
        pass


@pytest.mark.parametrize(
    ("args", "field"),
    [({"block_size": 64}, "block_tokens"), ({"dtype": "float32"}, "dtype")],
)
def test_another_spec_under_the_same_name_is_refused_with_both_values(
    args: dict[str, Any], field: str, engine: Engine, store: StoreProcess, tiny_qwen3: Path
) -> None:
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [prompt(100)])
        seals_done(llm)
    both = rf"{field}: .* \(this engine\) != .* \(the pool\)"
    with pytest.raises(Exception, match=both), engine(tiny_qwen3, store.endpoint, **args):
        pass
    with engine(tiny_qwen3, store.endpoint, kvsieve={"pool": "another"}, **args) as llm:
        assert generate(llm, [prompt(100)])[0].cached == 0


def test_another_hash_seed_is_refused(
    engine: Engine, store: StoreProcess, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    with engine(tiny_qwen3, store.endpoint) as llm:
        generate(llm, [prompt(100)])
        seals_done(llm)
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    with pytest.raises(Exception, match="hash_seed"), engine(tiny_qwen3, store.endpoint):
        pass


def all_blocks(admin: AdminClient, pool: str) -> list[Any]:
    blocks, token = [], ""
    while True:
        page = admin.list_blocks(pool, page_size=1000, page_token=token)
        blocks += page.blocks
        token = page.next_page_token
        if not token:
            return blocks


def wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
