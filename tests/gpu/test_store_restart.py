"""The store dies under a CUDA engine and a smaller one comes back: requests go on, saving starts anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.conftest import StoreProcess
from tests.engine.generate import connector_of, counters, generate, prompt, seals_done
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
