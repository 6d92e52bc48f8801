"""Sparse mode against stock vLLM: logits of the same tokens, with most rows in the arena.

A stock engine is run several times, which gives the spread of its own answers; a sparse one must be no
further from it than that. What each test measured goes to the terminal on lines that begin with "= ".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StoreProcess
from tests.engine.generate import counters, generate, seals_done
from tests.gpu.forcing import (
    Comparison,
    Drive,
    Scores,
    Task,
    compare,
    continued,
    one_by_one,
    run,
    together,
    tokens,
)
from tests.gpu.host_backed import (
    Squeeze,
    block_pool,
    host_share,
    overwrite_arena,
    row_counts,
    squeezed,
    throw_out,
)
from tests.gpu.test_cache_mode import arena_ready

Engine = Callable[..., AbstractContextManager[Any]]

LENGTHS = [3000, 9000, 20_000]
SHORT_LENGTHS = [70, 600, 1900]
"""Prompts that are never host-backed: all their blocks stay on the GPU."""
STEPS = 96
"""Decoded tokens of each request: one or two blocks of 64 fill."""
STOCK_RUNS = 4
NEW_TOKENS = 700
"""What the prompts have beyond the prefixes that an engine saved before a restart."""

HOT_ROWS = 2048
"""As few as can be: the top-k. Requests of more than a hot buffer's tokens give up their blocks."""
GPU_BLOCKS = 1400
"""Blocks of the sparse engine's pool. All requests at once take about 900 for indexer, windows and hot
buffers, and 2,000 more would hold their main planes."""
FEW_BLOCKS = 3
"""Left free while all requests decode: less than they grow by."""

pytestmark = pytest.mark.timeout(500)

FP8 = {"kv_cache_dtype": "fp8", "backend": "FLASHMLA_SPARSE"}
CASES = {
    "fp8-eager": FP8 | {"enforce_eager": True},
    "fp8-piecewise": FP8 | {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "fp8-full": FP8 | {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "bf16-flashattn-full": {"backend": "FLASH_ATTN_MLA_SPARSE"},
    "bf16-flashmla-full": {"backend": "FLASHMLA_SPARSE"},
}


@dataclass(frozen=True)
class Reference:
    """What stock vLLM says, scores of each run. tasks: prompts with the tokens to force.

    alone, cached: one task after another, without and with its own prefix cache. mixed: all at once.
    """

    tasks: list[Task]
    alone: list[list[Scores]]
    cached: list[list[Scores]]
    mixed: list[list[Scores]]

    @property
    def any(self) -> list[list[Scores]]:
        """For runs whose batches are like none of these."""
        return self.alone + self.cached + self.mixed


_references: dict[tuple[str, int], Reference] = {}


@pytest.fixture
def reference(tiny_dsa: Path, gpu_engine: Engine) -> Callable[..., Reference]:
    """reference(case, lengths of the prompts): measured once per session."""

    def measure(case: str, lengths: list[int] = LENGTHS) -> Reference:
        key = case, lengths[0]
        if key not in _references:
            with gpu_engine(tiny_dsa, **arguments_of(case)) as llm:
                prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
                tasks = continued(llm, prompts, STEPS)
                found = Reference(tasks, [], [], [])
                for number in range(STOCK_RUNS):
                    assert llm.reset_prefix_cache()
                    found.alone.append(one_by_one(llm, tasks))
                    if number % 2:
                        found.cached.append(one_by_one(llm, tasks))
                    assert llm.reset_prefix_cache()
                    found.mixed.append(together(llm, tasks))
                _references[key] = found
        return _references[key]

    return measure


@pytest.fixture
def sparse(tiny_dsa: Path, gpu_engine: Engine) -> Callable[..., AbstractContextManager[Any]]:
    """sparse(case, store, **more arguments): an engine in sparse mode whose arena is pinned."""

    @contextmanager
    def start(case: str, store: StoreProcess, **more: Any) -> Iterator[Any]:
        arguments = arguments_of(case) | {"num_gpu_blocks_override": GPU_BLOCKS} | more
        own = {"mode": "sparse", "hot_rows": HOT_ROWS}
        with gpu_engine(tiny_dsa, store.endpoint, kvsieve=own, disable_log_stats=False, **arguments) as llm:
            arena_ready(llm)
            yield llm

    return start


@pytest.fixture
def big_store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store("--pool-size", "1GiB")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_as_near_to_stock_as_stock_is_to_itself(
    case: str, reference: Callable[[str], Reference], sparse: Any, big_store: StoreProcess
) -> None:
    stock = reference(case)
    with sparse(case, big_store) as llm:
        squeeze = Squeeze(llm)
        mixed = together(llm, stock.tasks, squeezed(squeeze)())
        squeeze.undo()
        seals_done(llm)
        assert llm.reset_prefix_cache()
        alone = one_by_one(llm, stock.tasks, squeezed(squeeze))
        squeeze.undo()
        rows = row_counts(llm)
    results = {
        "all at once": compare(mixed, stock.mixed),
        "one by one, prefixes matched": compare(alone, stock.any),
    }
    _tell(case, results, squeeze.shares, rows)
    assert min(squeeze.shares) > 0.8
    assert rows["missed_rows"] > 0
    assert rows["unplaced_rows"] == 0
    assert all(result.alike for result in results.values())


def test_short_prompts_are_read_on_the_gpu(
    reference: Callable[..., Reference], sparse: Any, big_store: StoreProcess
) -> None:
    stock = reference("fp8-full", SHORT_LENGTHS)
    with sparse("fp8-full", big_store) as llm:
        mixed = together(llm, stock.tasks)
        seals_done(llm)
        assert llm.reset_prefix_cache()
        alone = one_by_one(llm, stock.tasks)
        rows = row_counts(llm)
    results = {"all at once": compare(mixed, stock.any), "one by one": compare(alone, stock.any)}
    _tell("short", results, [], rows)
    assert rows["gpu_rows"] > 0
    assert rows["unplaced_rows"] == 0
    assert all(result.alike for result in results.values())


def test_prompts_go_on_from_prefixes_that_an_engine_saved_before_it_was_restarted(
    reference: Callable[[str], Reference], sparse: Any, big_store: StoreProcess
) -> None:
    stock = reference("fp8-full")
    prefixes = [task.prompt[:-NEW_TOKENS] for task in stock.tasks]
    with sparse("fp8-full", big_store) as llm:
        generate(llm, [{"prompt_token_ids": ids} for ids in prefixes], max_tokens=1)
        seals_done(llm)
    with sparse("fp8-full", big_store) as llm:
        cached = [
            a.cached for a in generate(llm, [{"prompt_token_ids": ids} for ids in prefixes], max_tokens=1)
        ]
        seals_done(llm)
        assert llm.reset_prefix_cache()
        squeeze = Squeeze(llm)
        first = together(llm, stock.tasks, squeezed(squeeze)())
        squeeze.undo()
        seals_done(llm)
        assert llm.reset_prefix_cache()
        again = one_by_one(llm, stock.tasks, squeezed(squeeze))
        squeeze.undo()
        rows = row_counts(llm)
        # The test's own test: rows do come from the arena, and wrong ones show.
        seals_done(llm)
        assert llm.reset_prefix_cache()
        overwrite_arena(llm)
        wrong = compare(together(llm, stock.tasks), stock.any)
    results = {"restarted": compare(first, stock.any), "and again": compare(again, stock.any)}
    _tell("restart", results | {"arena overwritten": wrong}, squeeze.shares, rows)
    assert cached == [(len(ids) - 1) // 64 * 64 for ids in prefixes]
    assert rows["unplaced_rows"] == 0
    assert all(result.alike for result in results.values())
    assert not wrong.alike


def test_preempted_requests_go_on(
    reference: Callable[[str], Reference], sparse: Any, big_store: StoreProcess
) -> None:
    stock = reference("fp8-full")
    with sparse("fp8-full", big_store) as llm:
        squeeze = Squeeze(llm)
        thrown_out = 0

        def preempt(drive: Drive, at: list[int]) -> None:
            """Squeezes, and preempts every request when the last task has so many tokens."""
            nonlocal thrown_out
            if at and drive.decoding and drive.seen[len(drive.tasks) - 1] >= at[0]:
                at.pop(0)
                squeeze.undo()
                thrown_out += throw_out(llm)
            else:
                squeeze(drive)

        scores = together(llm, stock.tasks, partial(preempt, at=[20, 60]))
        squeeze.undo()
        rows = row_counts(llm)
        seals_done(llm)
        assert llm.reset_prefix_cache()
        starved, before = Squeeze(llm, FEW_BLOCKS), _preemptions(llm)
        few = together(llm, stock.tasks, squeezed(starved)())
        starved.undo()
        natural = _preemptions(llm) - before
    results = {"thrown out twice": compare(scores, stock.any), "too few blocks": compare(few, stock.any)}
    _tell("preemption", results, squeeze.shares, rows)
    print(f"= preemption: {thrown_out} requests thrown out, {natural} preempted for want of blocks")
    assert thrown_out > len(stock.tasks)
    assert natural > 0
    assert rows["unplaced_rows"] == 0
    assert all(result.alike for result in results.values())


def test_the_next_turn_begins_with_the_rows_that_were_hot_before_the_engine_was_restarted(
    reference: Callable[[str], Reference], sparse: Any, big_store: StoreProcess
) -> None:
    stock = reference("fp8-full")
    with sparse("fp8-full", big_store) as llm:
        squeeze = Squeeze(llm)
        together(llm, stock.tasks, squeezed(squeeze)())
        squeeze.undo()
        seals_done(llm)
    with sparse("fp8-full", big_store) as llm:
        before = counters(llm)
        turns = [[*task.prompt, *task.forced, *tokens(40, 9)] for task in stock.tasks]
        generate(llm, [{"prompt_token_ids": ids} for ids in turns], max_tokens=STEPS)
        now = counters(llm)
        rows = row_counts(llm)
    moved = {name: now[name] - before.get(name, 0) for name in ("used_hints", "refused_hints", "warmed_rows")}
    print(f"= next turn after a restart: {moved}; rows {rows}")
    assert moved["used_hints"] == len(stock.tasks)
    assert moved["refused_hints"] == 0
    assert moved["warmed_rows"] >= rows["prefetched_rows"] > 0
    assert rows["prefetched_rows_used"] > 0
    assert rows["unplaced_rows"] == 0


def test_slots_and_tables_are_used_again_after_aborts(
    reference: Callable[[str], Reference], sparse: Any, start_store: Callable[..., StoreProcess]
) -> None:
    """An arena of about 900 slots, through which 2,500 blocks go; a third of the requests is aborted."""
    stock = reference("fp8-full")
    store = start_store("--pool-size", "192MiB")
    others = [Task(tokens(5000 + 500 * seed, 100 + seed), steps=STEPS) for seed in range(4)]
    results: dict[str, Comparison] = {}
    with sparse("fp8-full", store) as llm:
        for turn in range(3):
            squeeze = Squeeze(llm)

            def hook(drive: Drive, squeeze: Squeeze = squeeze) -> None:
                if drive.decoding and not drive.aborted:
                    drive.abort(0)
                    drive.abort(1)
                squeeze(drive)

            kept = stock.tasks[turn]
            found = run(llm, [others[turn], others[turn + 1], kept], hook)
            results[f"turn {turn}, beside two aborted"] = compare(
                [found[2][1]], [[scores[turn]] for scores in stock.any]
            )
            squeeze.undo()
        early = run(
            llm, [*others, *stock.tasks], partial(_abort_while_prefilling, aborted=range(len(others)))
        )
        results["after aborts in prefill"] = compare(
            [early[len(others) + i][1] for i in range(len(stock.tasks))], stock.any
        )
        seals_done(llm)
        rows = row_counts(llm)
        share = host_share(llm)
        pool = block_pool(llm)
        free, total = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
    _tell("aborts", results, [], rows)
    assert share != share, "requests are still running"
    assert free == total
    assert rows["unplaced_rows"] == 0
    assert all(result.alike for result in results.values())


def _abort_while_prefilling(drive: Drive, aborted: range) -> None:
    """One after another, one a step, from the third step on."""
    number = drive.steps - 3
    if number in aborted:
        drive.abort(number)


def arguments_of(case: str) -> dict[str, Any]:
    """Of vllm.LLM, for an engine of CASES, stock or not."""
    settings = dict(CASES[case])
    # Prefill of short contexts would take dense kernels in stock vLLM, which the sparse tier does not.
    attention = {"backend": settings.pop("backend"), "sparse_mla_force_mqa": True}
    return {
        "max_model_len": 24_576,
        "enable_trace_replay": True,
        "attention_config": attention,
        **settings,
    }


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _tell(case: str, results: dict[str, Comparison], shares: list[float], rows: dict[str, int]) -> None:
    for name, result in results.items():
        print(f"= {case}, {name}: {result}")
    held = ", ".join(f"{share:.0%}" for share in shares)
    print(f"= {case}: blocks that only the arena holds: {held or '-'}; rows {rows}")
