"""Decode speed of a dense model in real engines: one request that fits the GPU, and more than fit it.

As `serve`, with grouped-query attention of a Llama: 32 layers, 8 KV heads of 128 channels, random weights;
stock vLLM against kvsieve, which attends to a budget of blocks, or does so once some have left the
pool. What a step misses depends on how much its picks are those of the step before; --steady sets that, and
the table tells what came of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.engines import MODELS, ROOT, Engines, EngineSpec, Load, kvsieve
from bench.gpu.serve import CHUNK, HELD, crowd, single
from bench.gpu.table import device, tell
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.store import TemporaryStore

LAYERS, HIDDEN, INNER = 32, 2048, 5504
BLOCK = 16
BLOCK_BYTES = LAYERS * 8 * BLOCK * 2 * 128 * 2
EXACT = "kvsieve-exact-in-pool"
"""With kvsieve.exact_in_pool."""
ENGINES = ("stock", "kvsieve", EXACT)
STEADY = 0.992
"""Share of a query that is the same in every step, as a part of its standard deviation. With it 8 requests
miss 13 % of the picks that the pool has not; one of SmolLM2 3 to 4 %, with the same budget, blocks and hot
buffer."""


def measure(
    names: Sequence[str] = ENGINES,
    *,
    crowds: Sequence[int] = (8,),
    prompt_tokens: int = 32_768,
    budget_tokens: int = 1024,
    hot_rows: int | None = None,
    steady: float = STEADY,
    repetitions: int = 3,
) -> Report:
    """crowds: numbers of requests past what the GPU holds. steady: 0 to 1. repetitions: of the load of one
    request."""
    alone = Load(1, prompt_tokens, 256)
    # Requests that are prefilled first decode meanwhile: long enough answers for all to decode together.
    loads = [Load(n, prompt_tokens, n * -(-prompt_tokens // CHUNK) + 160, seed=10_000 * n) for n in crowds]
    longest = prompt_tokens + max([alone.answer_tokens, *(load.answer_tokens for load in loads)])
    blocks = HELD * -(-longest // BLOCK) + 2
    # A pool for each engine, so that none begins with what another has saved; each has a share of the arena.
    pools = len([name for name in names if name != "stock"])
    one = max([2, *crowds]) * (longest + 4096) // BLOCK * BLOCK_BYTES
    store_gib = max(pools, 1) * (-(-one // 2**30) + 1)
    arguments = {
        "model": str(_model(steady)),
        "block_size": BLOCK,
        "kv_cache_memory_bytes": blocks * BLOCK_BYTES,
        "max_model_len": -(-longest // 1024) * 1024 + 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK,
        "gpu_memory_utilization": 0.3,  # asked for, not taken: others share the device
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    rows: list[dict[str, Any]] = []
    with TemporaryStore("--pool-size", f"{store_gib}GiB") as store:
        own: dict[str, Any] = {"mode": "sparse", "budget_tokens": budget_tokens}
        own |= {"hot_rows": hot_rows} if hot_rows else {}
        specs = []
        for name in names:
            transfer = kvsieve(store.endpoint, **own, exact_in_pool=name == EXACT, pool=name)
            more = {} if name == "stock" else {"kv_transfer_config": transfer}
            specs.append(EngineSpec(name, arguments | more))
        with Engines(specs) as engines:
            rows += single(engines, alone, repetitions)
            for load in loads:
                rows += crowd(engines, load)
            for name, why in engines.failed.items():
                rows.append({"case": "failed", "engine": name, "error": why.splitlines()[0][:150]})
            about = engines.about
    parameters = {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "prompt_tokens": prompt_tokens,
        "budget_tokens": budget_tokens,
        "hot_rows": hot_rows,
        "block_tokens": BLOCK,
        "steady": steady,
        "cache_bytes": blocks * BLOCK_BYTES,
        "stock_holds": HELD,
        "store_gib": store_gib,
        "engines": about,
        **device(),
    }
    return Report("gpu-dense", parameters, rows, _goals(rows))


def _model(steady: float) -> Path:
    path: Path = MODELS / f"dense-{LAYERS}-{HIDDEN}-{steady:g}"
    if not (path / "config.json").exists():
        maker = [sys.executable, str(ROOT / "tests/gpu/make_dense.py"), str(path), "--layers", str(LAYERS)]
        shape = ["--hidden", str(HIDDEN), "--inner", str(INNER), "--steady", str(steady)]
        subprocess.run([*maker, *shape], check=True)
    return path


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        if row.get("engine") != "kvsieve":
            continue
        if row["case"] == "1 request" and "itl_ratio" in row:
            goals.append(
                Goal(
                    "time between tokens, 1 request",
                    row["itl_ratio"],
                    1.05,
                    "x",
                    at_least=False,
                )
            )
        elif "throughput_ratio" in row:
            goals.append(Goal(f"decode, {row['case']}", row["throughput_ratio"], 2.0, "x"))
    return goals


_COLUMNS = [
    *("case", "engine", "decoding", "itl_ms", "itl_p95_ms", "itl_ratio", "tokens_s", "throughput_ratio"),
    *("load_s", "load_ratio", "preempted", "missed_share", "error"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu dense", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--crowds", nargs="*", type=int, default=[8], help="requests past the GPU's room")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that a step picks")
    parser.add_argument("--hot-rows", type=int, help="of kvsieve's hot buffers")
    parser.add_argument("--steady", type=float, default=STEADY, help="share of a query that stays, 0 to 1")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args(arguments)
    tell(
        measure(
            args.engines,
            crowds=args.crowds,
            prompt_tokens=args.prompt,
            budget_tokens=args.budget,
            hot_rows=args.hot_rows,
            steady=args.steady,
            repetitions=args.repetitions,
        ),
        _COLUMNS,
    )


if __name__ == "__main__":
    main()
