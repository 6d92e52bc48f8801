"""Prompts, and what an engine answers to them, in a form that tests can compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """tokens: generated ids. logprobs: of each, in nats. cached: prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    def distance(self, other: Answer) -> float:
        """Largest difference of the logprobs of the same tokens; infinite when the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def prompt(length: int, seed: int = 0, vocab: int = 1000) -> list[int]:
    """`length` token ids that look random and are the same in every run."""
    return [(7 * i * i + 13 * seed + 31 * i * seed + 2) % vocab + 2 for i in range(length)]


def generate(llm: Any, prompts: Sequence[list[int] | dict[str, Any]], max_tokens: int = 16) -> list[Answer]:
    """Greedy answers, in the order of the prompts (lists of ids, or dicts as vLLM takes them)."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        logprobs = [
            step[t].logprob for t, step in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        answers.append(Answer(tuple(completion.token_ids), tuple(logprobs), output.num_cached_tokens or 0))
    return answers


def connector_of(llm: Any, role: str = "scheduler") -> Any:
    """The engine's KVSieveConnector, of an engine in this process."""
    if role == "worker":
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def counters(llm: Any) -> dict[str, float]:
    """The connector's Prometheus counters, without prefix and suffix; needs disable_log_stats=False."""
    prefix = "vllm:kvsieve_"
    return {m.name.removeprefix(prefix): m.value for m in llm.get_metrics() if m.name.startswith(prefix)}


def seals_done(llm: Any, timeout: float = 20.0) -> None:
    """Lets the engine step until all that it saved is sealed: a seal's answer comes after the step that sent
    it, and the connector asks for more steps until then."""
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + timeout
    while core.scheduler.has_requests():
        core.step_fn()
        assert time.monotonic() < deadline, "seals are not answered"
        time.sleep(0.001)
    assert not connector_of(llm)._scheduler._saves
