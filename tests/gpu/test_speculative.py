"""Sparse mode with a drafter (MTP) against stock vLLM with the same one: logits of the same tokens, and the
drafts, with most rows in the arena. What was measured goes to the terminal on lines that begin with "= ".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.conftest import StoreProcess
from tests.engine.generate import seals_done
from tests.gpu.forcing import Drive, compare, tokens
from tests.gpu.host_backed import (
    Squeeze,
    overwrite_arena,
    row_counts,
    squeezed,
    throw_out,
)
from tests.gpu.speculation import Replayed, continued, processor, replay
from tests.gpu.test_cache_mode import arena_ready

Engine = Callable[..., AbstractContextManager[Any]]

LENGTHS = [3000, 9000, 20_000]
STEPS = 96
STOCK_RUNS = 3
"""Each of them twice: the second time, its own prefix cache has the prompts."""
GPU_BLOCKS = 4000
"""Of which three hot buffers take 960, or with three drafts 1,920. The squeeze takes what is not needed."""
TOPK = 2048
SLACK = 0.03
"""Of drafts that may differ beyond those that differ between stock runs."""

pytestmark = pytest.mark.timeout(400)

FP8 = {"kv_cache_dtype": "fp8", "backend": "FLASHMLA_SPARSE"}
GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
CASES = {
    "fp8-1-full": FP8 | GRAPHS | {"drafts": 1},
    "fp8-3-full": FP8 | GRAPHS | {"drafts": 3},
    "fp8-3-eager": FP8 | {"enforce_eager": True, "drafts": 3},
    # All drafts but the first in one graph, which renews its own metadata.
    "bf16-flashattn-3-full": GRAPHS | {"backend": "FLASH_ATTN_MLA_SPARSE", "drafts": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_drafts_are_as_near_to_stock_as_stock_is_to_itself(
    case: str, gpu_engine: Engine, tiny_dsa_mtp: Path, start_store: Callable[..., StoreProcess]
) -> None:
    arguments, drafts = _arguments(case)
    stock: list[Replayed] = []
    with gpu_engine(tiny_dsa_mtp, **arguments) as llm:
        tasks = continued(llm, [tokens(length, seed) for seed, length in enumerate(LENGTHS)], STEPS)
        for _ in range(STOCK_RUNS):
            assert llm.reset_prefix_cache()
            stock += [replay(llm, tasks), replay(llm, tasks)]
        stock_counts = _drafted(llm)

    store = start_store("--pool-size", "1GiB")
    own = {"mode": "sparse", "hot_rows": TOPK * (1 + drafts)}
    sparse = arguments | {"num_gpu_blocks_override": GPU_BLOCKS, "kvsieve": own}
    with gpu_engine(tiny_dsa_mtp, store.endpoint, **sparse) as llm:
        arena_ready(llm)
        before, squeeze = _drafted(llm), Squeeze(llm)
        runs = {"all at once": replay(llm, tasks, squeezed(squeeze)())}
        squeeze.undo()
        seals_done(llm)
        assert llm.reset_prefix_cache()
        thrown_out: list[int] = []
        hook = partial(_squeeze_and_preempt, squeeze=squeeze, thrown_out=thrown_out)
        runs["prefixes matched, preempted"] = replay(llm, tasks, hook)
        squeeze.undo()
        rows, counts = row_counts(llm), _drafted(llm)
        counts = counts[0] - before[0], counts[1] - before[1]
        # The test's own test: the drafter's rows do come from the arena, and wrong ones show in drafts alone.
        seals_done(llm)
        assert llm.reset_prefix_cache()
        overwrite_arena(llm, drafter_only=True)
        wrong = replay(llm, tasks)

    reference = [run.scores for run in stock]
    results = {name: compare(run.scores, reference) for name, run in runs.items()}
    between = [a.agreement(b) for i, a in enumerate(stock) for b in stock[:i]]
    same = {name: max(run.agreement(other) for other in stock) for name, run in runs.items()}
    same_wrong = max(wrong.agreement(other) for other in stock)
    _tell(case, "stock", f"{stock_counts[1]} of {stock_counts[0]} drafts accepted")
    _tell(case, "stock", f"runs agree on {min(between):.1%} to {max(between):.1%} of drafts")
    for name, result in results.items():
        _tell(case, name, f"{result}; {same[name]:.1%} of drafts are those of stock")
    _tell(case, "drafter's arena overwritten", compare(wrong.scores, reference))
    _tell(case, "drafter's arena overwritten", f"{same_wrong:.1%} of drafts are those of stock")
    _tell(case, "sparse", f"{counts[1]} of {counts[0]} drafts accepted; {thrown_out} requests thrown out")
    held = ", ".join(f"{share:.0%}" for share in squeeze.shares)
    _tell(case, "sparse", f"blocks that only the arena holds: {held}; rows {rows}")

    assert min(squeeze.shares) > 0.75
    assert thrown_out == [len(tasks)]
    assert rows["missed_rows"] > 0
    assert rows["unplaced_rows"] == 0
    for drafted, accepted in (stock_counts, counts):
        assert 0 < accepted < drafted
    assert all(result.alike for result in results.values())
    assert min(same.values()) >= min(between) - SLACK
    assert same_wrong < min(between) - 3 * SLACK


def _arguments(case: str) -> tuple[dict[str, Any], int]:
    """Of vllm.LLM, and how many drafts."""
    settings: dict[str, Any] = dict(CASES[case])
    drafts = settings.pop("drafts")
    arguments = {
        "max_model_len": 24_576,
        "disable_log_stats": False,
        "logits_processors": [processor()],
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts},
        "attention_config": {"backend": settings.pop("backend"), "sparse_mla_force_mqa": True},
    }
    return arguments | settings, drafts


def _squeeze_and_preempt(drive: Drive, squeeze: Squeeze, thrown_out: list[int]) -> None:
    """Squeezes, and once preempts every request in the midst of it."""
    if not thrown_out and drive.decoding and drive.seen[len(drive.tasks) - 1] >= STEPS // 3:
        squeeze.undo()
        thrown_out.append(throw_out(drive.llm))
    else:
        squeeze(drive)


def _drafted(llm: Any) -> tuple[int, int]:
    """Drafts since the engine's start, and how many of them were accepted."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    names = ("num_draft_tokens", "num_accepted_tokens")
    return tuple(int(metrics[f"vllm:spec_decode_{name}"].value) for name in names)  # type: ignore[return-value]


def _tell(case: str, what: str, found: object) -> None:
    print(f"= {case}, {what}: {found}")
