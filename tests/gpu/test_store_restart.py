"""The store dies under a CUDA engine and a smaller one comes back: requests go on, saving starts anew.
Or only the connection breaks: the arena stays pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvsieve_connector.copy.pinning import CudaRegistrar
from tests.conftest import StoreProcess
from tests.engine.generate import connector_of, counters, generate, prompt, seals_done
from tests.engine.test_serving import wait_for
from tests.fault.proxy import Proxy
from tests.gpu.test_cache_mode import arena_ready

Engine = Callable[..., AbstractContextManager[Any]]


def test_a_smaller_store_comes_back_while_copies_are_under_way(
    gpu_engine: Engine, start_store: Callable[..., StoreProcess], tiny_qwen3: Path
) -> None:
    from vllm import SamplingParams

    store = start_store("--pool-size", "512MiB")
    prompts = [prompt(6000, seed) for seed in range(4)]
    with gpu_engine(tiny_qwen3, store.endpoint, disable_log_stats=False, enforce_eager=True) as llm:
        arena_ready(llm)
        generate(llm, prompts)
        seals_done(llm)
        llm.reset_prefix_cache()
        client = connector_of(llm)._session._client
        for number, ids in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(f"r{number}", {"prompt_token_ids": ids}, params)
        answers: dict[str, int] = {}
        steps = 0
        while llm.llm_engine.has_unfinished_requests():
            if steps == 2:  # loads have been launched
                store.kill()
                store.flags = ("--pool-size", "128MiB")
                store.start()
                deadline = time.monotonic() + 20
                while client.attachment is None or client.attachment.epoch == 1:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            for output in llm.llm_engine.step():
                if output.finished:
                    answers[output.request_id] = len(output.outputs[0].token_ids)
            steps += 1
        assert answers == {f"r{n}": 16 for n in range(4)}
        arena_ready(llm)
        generate(llm, [prompt(3000, 50)])
        seals_done(llm)
        sums = counters(llm)
        print({name: value for name, value in sums.items() if value})
        assert sums["store_losses"] == 1
    with gpu_engine(tiny_qwen3, store.endpoint, disable_log_stats=False, enforce_eager=True) as llm:
        arena_ready(llm)
        assert generate(llm, [prompt(3000, 50)])[0].cached > 2900


def test_the_same_store_attached_anew_is_not_pinned_anew(
    gpu_engine: Engine, store: StoreProcess, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are loaded by the first request that comes after."""
    registered: list[int] = []
    register = CudaRegistrar.register

    def note(self: CudaRegistrar, address: int, size: int) -> int:
        registered.append(address)
        return register(self, address, size)

    monkeypatch.setattr(CudaRegistrar, "register", note)
    with (
        Proxy(store.endpoint) as proxy,
        gpu_engine(tiny_qwen3, proxy.endpoint, disable_log_stats=False, enforce_eager=True) as llm,
    ):
        arena_ready(llm)
        generate(llm, [prompt(6000)])
        seals_done(llm)
        llm.reset_prefix_cache()
        client, worker = connector_of(llm)._session._client, connector_of(llm, "worker")._worker
        address, pinning, calls = worker._arena.address(0), worker._engine._pinning, len(registered)
        proxy.cut()
        wait_for(lambda: client.attachment is None)
        generate(llm, [prompt(40, 3)])  # the workers are told
        assert worker._arena is None
        proxy.mend()
        wait_for(lambda: client.attachment is not None)
        again = generate(llm, [prompt(6000)])[0]
        print(f"chunks registered: {calls} before, {len(registered) - calls} after; cached {again.cached}")
        assert (worker._arena.address(0), worker._engine._pinning) == (address, pinning)
        assert len(registered) == calls
        assert again.cached > 5900
        assert counters(llm)["store_losses"] == 1
