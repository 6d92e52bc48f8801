"""Sparse mode on a dense model against stock vLLM, with most blocks in the arena: exact where the budget
covers the context, and the same approximation wherever blocks are read.

What each test measured goes to the terminal on lines that begin with "= ".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import StoreProcess
from tests.engine.generate import generate, seals_done
from tests.gpu.forcing import (
    Comparison,
    Drive,
    Scores,
    Task,
    compare,
    continued,
    one_by_one,
    together,
    tokens,
)
from tests.gpu.host_backed import (
    Squeeze,
    block_pool,
    overwrite_arena,
    piece_counts,
    scheduler_of,
    squeezed,
    throw_out,
)
from tests.gpu.test_cache_mode import arena_ready

Engine = Callable[..., AbstractContextManager[Any]]

LENGTHS = [1500, 3000, 6000]
STEPS = 48
STOCK_RUNS = 3
MAX_LEN = 8192
WHOLE = {"budget_tokens": 6400}
"""A budget that covers every context."""
FEW = {"budget_tokens": 512}

CASES: dict[str, dict[str, Any]] = {
    "full-graphs": {},
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "blocks-of-64": {"block_size": 64},
}

pytestmark = pytest.mark.timeout(500)

_references: dict[str, tuple[list[Task], list[list[Scores]]]] = {}


@pytest.fixture
def reference(tiny_dense: Path, gpu_engine: Engine) -> Callable[[str], tuple[list[Task], list[list[Scores]]]]:
    """reference(case): the tasks, and what several stock runs say of them."""

    def measure(case: str) -> tuple[list[Task], list[list[Scores]]]:
        if case not in _references:
            with gpu_engine(tiny_dense, **arguments_of(case)) as llm:
                tasks = continued(llm, [tokens(length, seed) for seed, length in enumerate(LENGTHS)], STEPS)
                runs = []
                for _ in range(STOCK_RUNS):
                    assert llm.reset_prefix_cache()
                    runs += [one_by_one(llm, tasks), one_by_one(llm, tasks)]  # the second from its own cache
                    assert llm.reset_prefix_cache()
                    runs.append(together(llm, tasks))
                _references[case] = tasks, runs
        return _references[case]

    return measure


@pytest.fixture
def sparse(tiny_dense: Path, gpu_engine: Engine) -> Callable[..., AbstractContextManager[Any]]:
    """sparse(case, store, settings, **more arguments): an engine in sparse mode whose arena is pinned."""

    @contextmanager
    def start(case: str, store: StoreProcess, own: dict[str, Any], **more: Any) -> Iterator[Any]:
        arguments = arguments_of(case) | more
        own = {"mode": "sparse", **own}
        with gpu_engine(tiny_dense, store.endpoint, kvsieve=own, disable_log_stats=False, **arguments) as llm:
            arena_ready(llm)
            yield llm

    return start


@pytest.fixture
def big_store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store("--pool-size", "1GiB")


@pytest.mark.parametrize("case", CASES)
def test_a_budget_of_the_whole_context_is_exact(
    case: str, reference: Any, sparse: Any, big_store: StoreProcess
) -> None:
    tasks, stock = reference(case)
    with sparse(case, big_store, WHOLE) as llm:
        # With hot buffers for all of it, only what begins with blocks of the store is read there.
        generate(llm, [{"prompt_token_ids": task.prompt} for task in tasks], max_tokens=1)
        seals_done(llm)
        assert llm.reset_prefix_cache()
        squeeze = Squeeze(llm)
        mixed = together(llm, tasks, squeezed(squeeze)())
        squeeze.undo()
        seals_done(llm)
        assert llm.reset_prefix_cache()
        alone = one_by_one(llm, tasks, squeezed(squeeze))  # begins with what the store has
        squeeze.undo()
        counts = piece_counts(llm)
        seals_done(llm)
        overwrite_arena(llm)
        wrong = compare(together(llm, tasks), stock)
    results = {"all at once": compare(mixed, stock), "one by one, prefixes matched": compare(alone, stock)}
    _tell(case, results | {"arena overwritten": wrong}, squeeze.shares, counts)
    assert min(squeeze.shares) > 0.8
    assert counts["arena_pieces"] > 0
    assert all(result.alike for result in results.values())
    assert not wrong.alike


def test_what_is_picked_does_not_depend_on_where_blocks_are(
    reference: Any, sparse: Any, big_store: StoreProcess
) -> None:
    """Lost one way or another: squeezed out, after preemptions, in an engine that was restarted."""
    tasks, stock = reference("full-graphs")
    runs, shares = [], []
    with sparse("full-graphs", big_store, FEW) as llm:
        squeeze = Squeeze(llm)
        for _ in range(2):
            runs.append(one_by_one(llm, tasks, squeezed(squeeze)))
        squeeze.undo()
        shares += squeeze.shares
        seals_done(llm)
        thrown_out = 0

        def preempt(drive: Drive, at: list[int]) -> None:
            nonlocal thrown_out
            if at and drive.decoding and drive.seen[0] >= at[0]:
                at.pop(0)
                thrown_out += throw_out(llm)

        preempted = one_by_one(llm, tasks, lambda: partial(preempt, at=[20]))
        seals_done(llm)
        counts = piece_counts(llm)
        free, total = block_pool(llm).get_num_free_blocks(), block_pool(llm).num_gpu_blocks - 1
    with sparse("full-graphs", big_store, FEW) as llm:
        restarted = one_by_one(llm, tasks)
    results = {
        "first against second": compare(runs[0], [runs[1], preempted, restarted]),
        "preempted": compare(preempted, [*runs, restarted]),
        "restarted": compare(restarted, [*runs, preempted]),
    }
    approximate = compare(runs[0], stock)
    _tell("picked", results | {"against stock": approximate}, shares, counts)
    assert free == total
    assert thrown_out == len(tasks)
    assert counts["hot_pieces"] > 0
    assert counts["arena_pieces"] > 0
    # All of these read the same keys and values up to the prompt's end, and pick the same blocks.
    assert all(result.mean_distance < 0.2 * approximate.mean_distance for result in results.values())


def test_more_requests_than_the_pool_could_hold(sparse: Any, big_store: StoreProcess) -> None:
    """Eight contexts of 4,000 tokens in a pool for three, by vLLM's own count of blocks."""
    prompts = [{"prompt_token_ids": tokens(4000, 50 + seed)} for seed in range(8)]
    blocks = 750
    own = {**FEW, "hot_rows": 840}
    with sparse("full-graphs", big_store, own, num_gpu_blocks_override=blocks, block_size=16) as llm:
        with running(llm) as steps:
            answers = generate(llm, prompts, max_tokens=64)
        seals_done(llm)
        free, total = block_pool(llm).get_num_free_blocks(), block_pool(llm).num_gpu_blocks - 1
        counts = piece_counts(llm)
    most = max(step.running for step in steps)
    print(f"= {most} requests of 251 blocks at once in {blocks} blocks; pieces {counts}")
    assert all(len(answer.tokens) == 64 for answer in answers)
    assert most * 251 > 2 * blocks
    assert free == total


def test_many_requests_at_once(
    tiny_dense: Path, gpu_engine: Engine, sparse: Any, start_store: Callable[..., StoreProcess]
) -> None:
    """More than 992 rows of a request and KV head each: then FlashAttention does without a schedule."""
    count, own = 132, {"budget_tokens": 448, "hot_rows": 496}
    sizes = {"max_model_len": 1024, "max_num_seqs": 160, "kv_cache_memory_bytes": 4 << 30}
    prompts = [tokens(380 + seed % 40, 200 + seed) for seed in range(count)]
    with gpu_engine(tiny_dense, **arguments_of("full-graphs") | sizes) as llm:
        tasks = continued(llm, prompts, 32)
        stock = []
        for run in (together, lambda llm, tasks: together(llm, tasks[::-1])[::-1], one_by_one):
            assert llm.reset_prefix_cache()
            stock.append(run(llm, tasks))
    with sparse("full-graphs", start_store("--pool-size", "2GiB"), own, **sizes) as llm:
        generate(llm, [{"prompt_token_ids": prompt} for prompt in prompts], max_tokens=1)
        seals_done(llm)
        assert llm.reset_prefix_cache()
        with running(llm) as steps:
            found = compare(together(llm, tasks), stock)
        counts = piece_counts(llm)
    most = max(step.decoding for step in steps)
    _tell("many", {f"{most} decoding at once": found}, [], counts)
    assert most * 8 > 992
    assert counts["arena_pieces"] > 0
    assert found.alike


class Step(NamedTuple):
    """How many requests run, and how many have one token in the step."""

    running: int
    decoding: int


@contextmanager
def running(llm: Any) -> Iterator[list[Step]]:
    """The steps from now on."""
    scheduler, steps = scheduler_of(llm), []
    stock = scheduler.schedule

    def note(*args: Any) -> Any:
        output = stock(*args)
        decoding = sum(count == 1 for count in output.num_scheduled_tokens.values())
        steps.append(Step(len(scheduler.running), decoding))
        return output

    scheduler.schedule = note
    try:
        yield steps
    finally:
        del scheduler.schedule


def arguments_of(case: str) -> dict[str, Any]:
    """Of vllm.LLM, for an engine of CASES, stock or not."""
    return {
        "max_model_len": MAX_LEN,
        "enable_trace_replay": True,
        "max_num_batched_tokens": 1024,
        **CASES[case],
    }


def _tell(case: str, results: dict[str, Comparison], shares: list[float], counts: dict[str, int]) -> None:
    for name, result in results.items():
        print(f"= dense {case}, {name}: {result}")
    held = ", ".join(f"{share:.0%}" for share in shares)
    print(f"= dense {case}: blocks that only the arena holds: {held or '-'}; pieces {counts}")
