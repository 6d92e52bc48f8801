"""Teacher forcing: every engine decodes the same tokens, and what it thought of them is compared.

vLLM's trace replay (`enable_trace_replay`) replaces each sampled token by a given one after the logits are
computed, so that two engines see the same contexts however their logits differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 32_000
SCORED = random.Random(0).sample(range(VOCABULARY), 64)
"""Tokens whose logprobs are compared at each step, besides the forced one."""

Scores = npt.NDArray[np.float32]
"""[steps, 1 + len(SCORED)]: logprobs in nats, of the forced token first."""


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids, the same in every run."""
    return random.Random(seed).choices(range(2, VOCABULARY), k=count)


@dataclass(frozen=True)
class Task:
    """A prompt, and the tokens to decode after it; none: whatever is likeliest, `steps` of them."""

    prompt: list[int]
    forced: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass
class Drive:
    """A run under way, as a hook sees it. seen: output tokens so far, by task."""

    llm: Any
    tasks: Sequence[Task]
    seen: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    aborted: set[int] = field(default_factory=set)

    @property
    def decoding(self) -> bool:
        """Whether every task that was not aborted has its first token: all prefills are over."""
        return all(self.seen.get(i, 0) or i in self.aborted for i in range(len(self.tasks)))

    def abort(self, task: int) -> None:
        self.llm.llm_engine.abort_request([str(task)])
        self.aborted.add(task)


Hook = Callable[[Drive], None]


def run(llm: Any, tasks: Sequence[Task], hook: Hook | None = None) -> dict[int, tuple[list[int], Scores]]:
    """Runs all tasks at once; returns tokens and scores of those that were not aborted, by task.

    hook: called after each step of the engine.
    """
    found = complete(llm, tasks, [_params(task) for task in tasks], hook)
    return {i: (list(c.token_ids), _scores(c.token_ids, c.logprobs)) for i, c in found.items()}


def complete(
    llm: Any, tasks: Sequence[Task], params: Sequence[Any], hook: Hook | None = None
) -> dict[int, Any]:
    """Runs all tasks at once, with their vllm.SamplingParams; returns vLLM's CompletionOutput by task."""
    drive = Drive(llm, tasks)
    for number, (task, given) in enumerate(zip(tasks, params, strict=True)):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": task.prompt}, given)
    found: dict[int, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            number, completion = int(output.request_id), output.outputs[0]
            drive.seen[number] = len(completion.token_ids)
            if output.finished and number not in drive.aborted:
                found[number] = completion
        drive.steps += 1
        if hook is not None:
            hook(drive)
    return found


def one_by_one(llm: Any, tasks: Sequence[Task], hook: Callable[[], Hook] | None = None) -> list[Scores]:
    """Scores of the tasks, each alone in its batch. hook: makes one for each."""
    return [run(llm, [task], hook() if hook else None)[0][1] for task in tasks]


def together(llm: Any, tasks: Sequence[Task], hook: Hook | None = None) -> list[Scores]:
    """Scores of the tasks, all at once: prefills of some share batches with decodes of others."""
    found = run(llm, tasks, hook)
    return [found[i][1] for i in range(len(tasks))]


def continued(llm: Any, prompts: Sequence[list[int]], steps: int) -> list[Task]:
    """Tasks that force each prompt's greedy continuation."""
    found = run(llm, [Task(prompt, steps=steps) for prompt in prompts])
    return [Task(prompt, found[i][0]) for i, prompt in enumerate(prompts)]


TAIL = 1.25
"""By how much a run may differ more than the few stock runs did: the largest of so few differences varies."""


@dataclass(frozen=True)
class Comparison:
    """A run against runs of the stock engine; distances are absolute differences of logprobs.

    spread, mean_spread: between stock runs, the largest and the largest mean of a pair. distance,
    mean_distance: to the nearest stock run. within: steps no further from it than `spread`. steps: all.
    """

    spread: float
    distance: float
    mean_spread: float
    mean_distance: float
    within: int
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.within} of {self.steps} steps pass, {self.steps - self.within} fail; largest difference "
            f"{self.distance:.4g}, of stock {self.spread:.4g}; mean {self.mean_distance:.3g}, of stock "
            f"{self.mean_spread:.3g}"
        )

    @property
    def alike(self) -> bool:
        return (
            self.within >= 0.99 * self.steps
            and self.distance <= TAIL * self.spread
            and self.mean_distance <= self.mean_spread * TAIL
        )


def compare(found: list[Scores], stock: Sequence[list[Scores]]) -> Comparison:
    """found: scores by task. stock: the same of each stock run, several.

    To the nearest run and not to a given one: of n + 1 like runs, one would be the furthest from a given one
    half of the time.
    """
    run_scores, runs = np.concatenate(found), [np.concatenate(scores) for scores in stock]
    apart = {(i, j): np.abs(runs[i] - runs[j]) for i, j in combinations(range(len(runs)), 2)}
    spread = max(float(d.max()) for d in apart.values())
    away = [np.abs(run_scores - other) for other in runs]
    nearest = min(away, key=lambda d: float(d.max()))
    return Comparison(
        spread=spread,
        distance=float(nearest.max()),
        mean_spread=max(float(d.mean()) for d in apart.values()),
        mean_distance=min(float(d.mean()) for d in away),
        within=int((nearest.max(axis=1) <= spread).sum()),
        steps=len(run_scores),
    )


def _params(task: Task) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=len(task.forced) or task.steps,
        trace_decode_token_ids=task.forced or None,
        logprob_token_ids=SCORED,
        ignore_eos=True,
        detokenize=False,
    )


def _scores(ids: Sequence[int], logprobs: Any) -> Scores:
    return np.array(
        [[step[t].logprob for t in (token, *SCORED)] for token, step in zip(ids, logprobs, strict=True)],
        np.float32,
    )
