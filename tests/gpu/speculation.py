"""Teacher forcing under speculative decoding, which vLLM's trace replay refuses.

A logits processor, one of vLLM's own kind, notes what the model thinks of each step, and then leaves only the
given token. A draft that is not the given token is rejected, as ever; what was noted after it is noted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.gpu.forcing import SCORED, Hook, Scores, Task, complete

_TASK = "kvsieve_task"


class Replay:
    """The processor; vLLM makes one per engine, `latest` is the last one's."""

    latest: Replay

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        Replay.latest = self
        self._device, self._states = req_states.device, req_states
        self._tasks = [-1] * req_states.max_num_reqs
        """Task of each request slot, -1: none of ours."""
        self.forced: torch.Tensor | None = None
        """int64 [tasks + 1, steps + 1]; the last row and column take what belongs nowhere, as below."""
        self.scores = self.drafts = self.depths = torch.empty(0)

    def begin(self, tasks: Sequence[Task]) -> None:
        """The next requests are these, in order."""
        shape = len(tasks) + 1, max(len(task.forced) for task in tasks) + 1
        forced = torch.zeros(shape, dtype=torch.int64)
        for row, task in enumerate(tasks):
            forced[row, : len(task.forced)] = torch.tensor(task.forced)
        self.forced = forced.to(self._device)
        self.scores = torch.full((*shape, 1 + len(SCORED)), torch.nan, device=self._device)
        self.drafts = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        self.depths = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._tasks[req_idx] = (sampling_params.extra_args or {}).get(_TASK, -1)
        return self._tasks[req_idx] >= 0

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """logits: float32 [rows, vocabulary]; row r says what follows the token at ctx.pos[r]."""
        if self.forced is None:
            return logits
        nobody, nowhere = (size - 1 for size in self.forced.shape)
        slots = ctx.expanded_idx_mapping.long()
        task = torch.tensor(self._tasks, device=self._device)[slots.clamp(min=0)]
        step = ctx.pos.long() + 1 - self._states.prompt_len.gpu[slots.clamp(min=0)].long()
        ours = (slots >= 0) & (task >= 0) & (step >= 0) & (step < nowhere)
        task, step = torch.where(ours, task, nobody), torch.where(ours, step, nowhere)
        forced = self.forced[task, step].unsqueeze(1)
        logprobs = logits.float().log_softmax(1)
        self.scores[task, step] = torch.cat((logprobs.gather(1, forced), logprobs[:, SCORED]), 1)
        drafted = ours & (ctx.expanded_local_pos > 0)
        place = torch.where(drafted, task, nobody), torch.where(drafted, step - 1, nowhere)
        self.drafts[place] = ctx.input_ids.long()
        self.depths[place] = ctx.expanded_local_pos.long()
        chosen = torch.where(ours.unsqueeze(1), 1e6, logits.gather(1, forced))
        return logits.scatter_(1, forced, chosen)


def processor() -> type:
    """The class to give to vllm.LLM(logits_processors=[...])."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    return type("ReplayProcessor", (Replay, LogitsProcessor), {})


@dataclass(frozen=True)
class Replayed:
    """One run. scores: by task. drafts, depths: int64 [tasks, steps], the token that was last drafted for
    each step, and the how-manieth of its step's drafts it was, 0: none."""

    scores: list[Scores]
    drafts: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]

    def agreement(self, other: Replayed) -> float:
        """Share of the same drafts, of those that both runs have made after as many others."""
        both = (self.depths == other.depths) & (self.depths > 0)
        return float((self.drafts == other.drafts)[both].mean())


def replay(llm: Any, tasks: Sequence[Task], hook: Hook | None = None) -> Replayed:
    """All tasks at once. Raises AssertionError when an answer is not what was forced."""
    state = Replay.latest
    state.begin(tasks)
    params = [_params(len(task.forced), number) for number, task in enumerate(tasks)]
    found = complete(llm, tasks, params, hook)
    for number, task in enumerate(tasks):
        assert list(found[number].token_ids) == task.forced
    scores = state.scores[:-1, :-1].cpu().numpy()
    assert not np.isnan(scores).any(), "a step was never scored"
    return Replayed(list(scores), state.drafts[:-1, :-1].cpu().numpy(), state.depths[:-1, :-1].cpu().numpy())


def continued(llm: Any, prompts: Sequence[list[int]], steps: int) -> list[Task]:
    """Tasks that force each prompt's greedy continuation."""
    tasks = [Task(prompt) for prompt in prompts]
    found = complete(llm, tasks, [_params(steps)] * len(tasks))
    return [Task(prompt, list(found[i].token_ids)) for i, prompt in enumerate(prompts)]


def _params(steps: int, task: int = -1) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=steps, extra_args={_TASK: task}, ignore_eos=True, detokenize=False
    )
