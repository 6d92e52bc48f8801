"""The benchmark: prefetch policies and replacements, by size of the hot buffer, over all traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.arguments import no_arguments
from bench.traces.capacity import requests_held
from bench.traces.hot_buffer import REPLACEMENTS, HotBuffer
from bench.traces.simulate import Run, simulate
from bench.traces.synthetic import Recipe, synthetic
from bench.traces.trace import Trace
from bench.traces.waits import Link, exposed_us
from kvsieve_connector.sparse.prefetch import Policy, make_policy
from kvsieve_store.bench.report import Report

SIZES = (1.0, 1.5, 1.625, 2.0, 4.0)
"""Hot rows as multiples of k."""

BATCHES = (1, 8, 32)
LINK = Link()

TOPK = 2048
"""The k that rows, bytes and waits are given for; traces are scaled up to it."""

RECIPES = (
    Recipe("overlap 0.50", 0.5),
    Recipe("overlap 0.70", 0.7),
    Recipe("overlap 0.85", 0.85),
    Recipe("overlap 0.97", 0.97),
    Recipe("overlap 0.70, layers 0.95", 0.7, layer_overlap=0.95),
    Recipe("overlap 0.70, 4 layers an index", 0.7, layer_overlap=0.6, share=4),
)

_WARM_UP = 64
_SHORT = "previous-layer, k/8 rows at most"
_LONG_LAYER_US = 300.0  # compute with the experts' part: more for a prefetch to hide behind


def measure(
    traces: Sequence[Trace],
    *,
    sizes: Sequence[float] = SIZES,
    batches: Sequence[int] = BATCHES,
    link: Link = LINK,
    warm_up: int = _WARM_UP,
) -> Report:
    """A row per trace, size and policy, with the clock, and per replacement, without prefetch.

    Rows are per request, layer and step, waits per layer and step, both for k = 2,048 and after `warm_up`
    steps. The first step's are those of one request that decodes alone.
    """
    rows: list[dict[str, Any]] = []
    for trace in traces:
        overlaps = {
            "step_overlap": round(float(trace.step_overlap().mean()), 3),
            "layer_overlap": round(float(trace.layer_overlap().mean()), 3),
            "new_layer_overlap": round(trace.new_layer_overlap(), 3),
        }
        none, *others = _policies(trace)
        for size in sizes:
            held = round(requests_held(round(size * TOPK)), 1)
            cases = [(none, each) for each in REPLACEMENTS] + [(policy, HotBuffer) for policy in others]
            for policy, replacement in cases:
                budget = trace.k // 8 if policy.name == _SHORT else None
                run = simulate(trace, policy, round(size * trace.k), replacement=replacement, budget=budget)
                rows.append(
                    {
                        "trace": trace.name,
                        **overlaps,
                        "hot_rows_k": size,
                        "requests_64k": held,
                        "policy": policy.name,
                        "replacement": replacement.name,
                        **_rows(trace, run, warm_up, link.row_bytes),
                        **_waits(trace, policy, run, link, batches, warm_up),
                    }
                )
    return Report("traces", {**vars(link), "k": TOPK, "warm_up_steps": warm_up}, rows)


def _policies(trace: Trace) -> list[Policy]:
    """First "none"; "index-share" only where layers share."""
    names = ["none", "previous-step", "previous-step+margin", "previous-layer"]
    policies = [make_policy(name, trace.layers) for name in names]
    policies.append(replace(policies[-1], name=_SHORT))
    if trace.leaders != tuple(range(trace.layers)):
        policies.append(make_policy("index-share", trace.layers, leaders=trace.leaders))
    return policies


def _rows(trace: Trace, run: Run, warm_up: int, row_bytes: int) -> dict[str, float]:
    counts = run.counts(warm_up)
    scale = TOPK / trace.k / ((len(run.misses) - warm_up) * trace.layers)
    asked = (run.hits + run.misses)[warm_up:].sum(0)
    missed = run.misses[warm_up:].sum(0) / asked.clip(1)
    return {
        "hit_rate": round(counts.hit_rate, 4),
        "hit_rate_worst_layer": round(1 - float(missed.max()), 4),
        "gpu_rows": round(scale * counts.gpu_rows, 1),
        "misses": round(scale * counts.missed_rows, 1),
        "prefetched": round(scale * counts.prefetched_rows, 1),
        "prefetched_used": round(scale * counts.prefetched_rows_used, 1),
        "prefetched_wasted": round(scale * counts.prefetched_rows_wasted, 1),
        "bytes": round(scale * counts.swapped_in_bytes(row_bytes)),
        "first_step_misses": round(TOPK / trace.k * float(run.misses[0].mean()), 1),
    }


def _waits(
    trace: Trace, policy: Policy, run: Run, link: Link, batches: Sequence[int], warm_up: int
) -> dict[str, float]:
    def waits(requests: int, steps: slice, compute_us: float = link.compute_us) -> float:
        some = exposed_us(
            run.misses[steps],
            run.prefetched[steps],
            policy,
            scale=TOPK / trace.k,
            link=replace(link, requests=requests, compute_us=compute_us),
        )
        return round(float(some.mean()), 2)

    warm = slice(warm_up, None)
    found = {f"wait_us_batch_{batch}": waits(batch, warm) for batch in batches}
    long = {f"wait_us_batch_{batch}_long_layer": waits(batch, warm, _LONG_LAYER_US) for batch in batches}
    return {**found, **long, "first_step_wait_us": waits(1, slice(0, 1))}


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.traces", __doc__, arguments)
    from bench.output import save
    from bench.traces import record

    save(measure([*record.traces(), *map(synthetic, RECIPES)]))


if __name__ == "__main__":
    main()
