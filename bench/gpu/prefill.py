"""Prefill with each mode of the connector against none, and how fast blocks go to the arena and come back.

Engines live side by side and take turns with the same prompts, new each time, so that all is computed and all
of it is saved. The connector's engines have pools of their own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from bench.gpu.engines import Engines, EngineSpec, Load, Run, common_arguments, kvsieve, model
from bench.gpu.table import device, tell
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.store import TemporaryStore

_TOKEN_BYTES = 656 + 132
ENGINES = ("stock", "cache", "sparse")


def measure(
    *, requests: int = 4, prompt_tokens: int = 32_768, layers: int = 16, repetitions: int = 5
) -> Report:
    load_bytes = requests * (prompt_tokens + 128) * layers * _TOKEN_BYTES
    pool_gib = -(-4 * load_bytes // 2**30)
    with TemporaryStore("--pool-size", f"{pool_gib}GiB") as store:
        arguments = common_arguments(model(layers), load_bytes * 5 // 4, prompt_tokens + 1024)
        specs = [EngineSpec("stock", arguments)]
        for mode in ENGINES[1:]:
            transfer = kvsieve(store.endpoint, mode=mode, pool=f"bench-{mode}")
            specs.append(EngineSpec(mode, arguments | {"kv_transfer_config": transfer}))
        runs: dict[str, list[Run]] = {}
        again: dict[str, Run] = {}
        with Engines(specs) as engines:
            for turn in range(repetitions):
                load = Load(requests, prompt_tokens, 1, seed=1 + turn)
                for name in engines.names[:: -1 if turn % 2 else 1]:
                    if run := engines.run(name, load):
                        runs.setdefault(name, []).append(run)
            for name in engines.names[1:]:  # the last prompts once more: they are in the store
                if run := engines.run(name, Load(requests, prompt_tokens, 1, seed=repetitions)):
                    again[name] = run
            failed, about = engines.failed, engines.about
    tokens = requests * prompt_tokens
    rows = [_row(name, tokens, runs[name], runs.get("stock", []), again.get(name)) for name in runs]
    rows += [{"engine": name, "error": why.splitlines()[0][:150]} for name, why in failed.items()]
    parameters = {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "layers": layers,
        "repetitions": repetitions,
        "pool_gib": pool_gib,
        "engines": about,
        **device(),
    }
    return Report("gpu-prefill", parameters, rows, _goals(rows))


def _row(name: str, tokens: int, runs: list[Run], stock: list[Run], again: Run | None) -> dict[str, Any]:
    ratios = [b.seconds / a.seconds for a, b in zip(runs, stock, strict=False)]
    row: dict[str, Any] = {
        "engine": name,
        "tokens_s": round(tokens / statistics.median(run.seconds for run in runs)),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    sums = [
        sum(run.counters.get(f"kvsieve_{n}", 0) for run in runs)
        for n in ("saved_bytes", "save_seconds", "saved_blocks", "skipped_saves", "failed_saves")
    ]
    if sums[0]:
        row |= {
            "save_gb_s": round(sums[0] / sums[1] / 1e9, 2) if sums[1] else None,
            "saved_gb": round(sums[0] / 1e9, 2),
            "saved_blocks": int(sums[2]),
            "not_saved": int(sums[3] + sums[4]),
        }
    if again is not None:
        loaded, seconds = (again.counters.get(f"kvsieve_{n}", 0) for n in ("loaded_bytes", "load_seconds"))
        row |= {
            "again_s": round(again.seconds, 3),
            "loaded_gb": round(loaded / 1e9, 2),
            "load_gb_s": round(loaded / seconds / 1e9, 2) if seconds else None,
        }
    return row


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        if row["engine"] != "stock" and row.get("ratio"):
            goals.append(Goal(f"prefill, mode {row['engine']}, of no connector", row["ratio"], 0.98, "x"))
        if row.get("save_gb_s"):
            goals.append(Goal(f"copies to the arena, mode {row['engine']}", row["save_gb_s"], 45.0, "GB/s"))
    return goals


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu prefill", description=__doc__)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens of a prompt")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args(arguments)
    tell(
        measure(
            requests=args.requests,
            prompt_tokens=args.prompt,
            layers=args.layers,
            repetitions=args.repetitions,
        )
    )


if __name__ == "__main__":
    main()
