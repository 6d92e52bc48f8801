"""Decode speed of real engines: one request that fits the GPU, and more requests than fit it.

Engines live side by side in processes of their own and take turns with the same prompts. Only steps that
decode and do nothing else count (steps.decode_speed); what a whole load took stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from bench.gpu.engines import Engines, EngineSpec, Load, Run, common_arguments, hisparse, kvsieve, model
from bench.gpu.steps import decode_speed
from bench.gpu.table import device, tell
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.store import TemporaryStore

LAYERS = 16
CHUNK = 2048
BLOCK = 64
HELD = 4
"""Requests that stock vLLM's cache has room for."""

_ROW_BYTES, _INDEXER_BYTES = 656, 132

ENGINES = ("stock", "kvsieve", "hisparse", "hisparse-buffer-2x", "hisparse-hash-2x")
SHARDED = "kvsieve-sharded"
"""With kvsieve.sharded_fetch; for tensor parallelism."""
LARGE = "kvsieve-hot-2x"
"""With hot buffers twice as large: fewer misses, and fewer requests held."""
_HOT_ROWS = 3072
"""The default of a model whose top-k is 2,048."""


def measure(
    names: Sequence[str] = ENGINES,
    *,
    crowds: Sequence[int] = (8, 12),
    prompt_tokens: int = 32_768,
    layers: int = LAYERS,
    repetitions: int = 3,
    hot_rows: int | None = None,
    tensor_parallel: int = 1,
) -> Report:
    """crowds: numbers of requests past what the GPU holds. repetitions: of the load of one request.
    tensor_parallel: GPUs of each engine, all of which keep the whole cache."""
    single = Load(1, prompt_tokens, 256)
    # Requests that are prefilled first decode meanwhile: long enough answers for all to decode together.
    loads = [Load(n, prompt_tokens, n * -(-prompt_tokens // CHUNK) + 160, seed=10_000 * n) for n in crowds]
    longest = prompt_tokens + max([single.answer_tokens, *(load.answer_tokens for load in loads)])
    blocks = HELD * -(-longest // BLOCK) + 2
    cache_bytes = blocks * BLOCK * layers * (_ROW_BYTES + _INDEXER_BYTES)
    rows: list[dict[str, Any]] = []
    most = max([1, *crowds]) * longest * layers
    # The arena keeps blocks of runs before, too. HiSparse's pools have the main plane, one for each engine.
    store_gib = -(-3 * most * (_ROW_BYTES + _INDEXER_BYTES) // 2**31)
    native_gib = -(-5 * most * _ROW_BYTES // 2**32)
    with TemporaryStore("--pool-size", f"{store_gib}GiB") as store:
        arguments = common_arguments(model(layers), cache_bytes, -(-longest // 1024) * 1024 + 1024)
        arguments["tensor_parallel_size"] = tensor_parallel
        with Engines(_specs(names, arguments, store.endpoint, native_gib, hot_rows)) as engines:
            rows += single(engines, single, repetitions)
            for load in loads:
                rows += crowd(engines, load)
            for name, why in engines.failed.items():
                rows.append({"case": "failed", "engine": name, "error": why.splitlines()[0][:150]})
            about = engines.about
    parameters = {
        "layers": layers,
        "prompt_tokens": prompt_tokens,
        "cache_bytes": cache_bytes,
        "stock_holds": HELD,
        "store_gib": store_gib,
        "hisparse_gib": native_gib,
        "hot_rows": hot_rows,
        "tensor_parallel": tensor_parallel,
        "weights": "random, standard deviation 0.02",
        "engines": about,
        **device(),
    }
    return Report("gpu-serve", parameters, rows, _goals(rows))


def _specs(
    names: Sequence[str], arguments: dict[str, Any], endpoint: str, native_gib: int, hot_rows: int | None
) -> list[EngineSpec]:
    own: dict[str, Any] = {"mode": "sparse"} | ({"hot_rows": hot_rows} if hot_rows else {})
    buffer = {"hisparse_config": {"device_buffer_size": 8192}}
    native = {"kv_transfer_config": hisparse(native_gib)}
    more: dict[str, dict[str, Any]] = {
        "stock": {},
        "kvsieve": {"kv_transfer_config": kvsieve(endpoint, **own)},
        SHARDED: {"kv_transfer_config": kvsieve(endpoint, **own, sharded_fetch=True)},
        LARGE: {"kv_transfer_config": kvsieve(endpoint, **own | {"hot_rows": 2 * (hot_rows or _HOT_ROWS)})},
        "hisparse": native,
        "hisparse-buffer-2x": native | {"attention_config": arguments["attention_config"] | buffer},
        "hisparse-hash-2x": native,
    }
    return [EngineSpec(name, arguments | more[name], name == "hisparse-hash-2x") for name in names]


def single(engines: Engines, load: Load, repetitions: int) -> list[dict[str, Any]]:
    """A load of one request: rows of the engines, from medians over the repetitions, in which they take turns
    in going first."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for turn in range(repetitions):
        again = Load(load.requests, load.prompt_tokens, load.answer_tokens, seed=1 + turn)
        for name in engines.names[:: -1 if turn % 2 else 1]:
            if run := engines.run(name, again):
                speed = decode_speed(run.steps)
                found.setdefault(name, []).append((speed.itl_ms, speed.itl_p95_ms, run.seconds))
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        itl, p95, seconds = (statistics.median(column) for column in zip(*values, strict=True))
        row = {"case": "1 request", "engine": name, "decoding": 1, "itl_ms": itl, "itl_p95_ms": p95}
        row |= {
            "tokens_s": round(1000 / itl, 1),
            "load_s": round(seconds, 2),
            "itls_ms": [v[0] for v in values],
        }
        if "stock" in found:
            pairs = zip(values, found["stock"], strict=False)
            row["itl_ratio"] = round(statistics.median(a[0] / b[0] for a, b in pairs), 4)
        rows.append(row)
    _compare_sharded(rows)
    return rows


def crowd(engines: Engines, load: Load) -> list[dict[str, Any]]:
    """A load of more requests than stock vLLM holds. A row for each engine."""
    rows: list[dict[str, Any]] = []
    for name in list(engines.names):
        if run := engines.run(name, load):
            rows.append(_crowd_row(name, load, run))
    stock = next((row for row in rows if row["engine"] == "stock"), None)
    for row in rows if stock else ():
        assert stock is not None
        row["itl_ratio"] = round(row["itl_ms"] / stock["itl_ms"], 3)
        row["throughput_ratio"] = round(row["tokens_s"] / stock["tokens_s"], 3)
        row["load_ratio"] = round(stock["load_s"] / row["load_s"], 3)
    _compare_sharded(rows)
    return rows


def _compare_sharded(rows: list[dict[str, Any]]) -> None:
    """Adds the sharded engine's time between tokens and load, of the plain one's."""
    plain, sharded = (next((r for r in rows if r["engine"] == name), None) for name in ("kvsieve", SHARDED))
    if plain and sharded:
        sharded["itl_of_plain"] = round(sharded["itl_ms"] / plain["itl_ms"], 3)
        sharded["load_of_plain"] = round(sharded["load_s"] / plain["load_s"], 3)


def _crowd_row(name: str, load: Load, run: Run) -> dict[str, Any]:
    speed = decode_speed(run.steps)
    tokens = load.requests * load.answer_tokens
    row = {
        "case": f"{load.requests} requests",
        "engine": name,
        "decoding": speed.requests,
        "itl_ms": speed.itl_ms,
        "itl_p95_ms": speed.itl_p95_ms,
        "tokens_s": speed.tokens_s,
        "load_s": round(run.seconds, 2),
        "load_tokens_s": round(tokens / run.seconds, 1),
        "steps": speed.steps,
        "preempted": run.preemptions,
        "counters": run.counters,
    }

    def count(*names: str) -> float:
        return sum(run.counters.get(f"kvsieve_{name}", 0.0) for name in names)

    asked, missed = count("asked_rows", "asked_pieces"), count("missed_rows", "arena_pieces")
    if asked:
        row["missed_share"] = round(missed / asked, 4)
    if missed:
        row["peer_share"] = round(run.counters.get("kvsieve_peer_rows", 0) / missed, 4)
    return row


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    def of(case: str, engine: str) -> dict[str, Any]:
        return next((r for r in rows if r.get("case") == case and r.get("engine") == engine), {})

    goals = []
    if ratio := of("1 request", "kvsieve").get("itl_ratio"):
        goals.append(Goal("time between tokens, 1 request, of stock", ratio, 1.03, "x", at_least=False))
    for case in dict.fromkeys(row["case"] for row in rows if row.get("throughput_ratio")):
        ours = of(case, "kvsieve").get("tokens_s")
        for engine, least in (("stock", 2.0), ("hisparse", 1.5), ("hisparse-hash-2x", 1.15)):
            if ours and (theirs := of(case, engine).get("tokens_s")):
                goals.append(Goal(f"decode, {case}, of {engine}", round(ours / theirs, 3), least, "x"))
    return goals


_COLUMNS = [
    *("case", "engine", "decoding", "itl_ms", "itl_p95_ms", "itl_ratio", "tokens_s", "throughput_ratio"),
    *("load_s", "load_ratio", "itl_of_plain", "load_of_plain", "preempted", "missed_share", "peer_share"),
    "error",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu serve", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=[*ENGINES, LARGE, SHARDED])
    parser.add_argument("--crowds", nargs="*", type=int, default=[8, 12], help="requests past the GPU's room")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens of a prompt")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--hot-rows", type=int, help="of kvsieve's hot buffers")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each engine")
    args = parser.parse_args(arguments)
    tell(
        measure(
            args.engines,
            crowds=args.crowds,
            prompt_tokens=args.prompt,
            layers=args.layers,
            repetitions=args.repetitions,
            hot_rows=args.hot_rows,
            tensor_parallel=args.tensor_parallel,
        ),
        _COLUMNS,
    )


if __name__ == "__main__":
    main()
