"""Time to bring a layer's missing rows into the hot buffer: this project's kernel against HiSparse's ops.

Every request asks for `K` rows of a context that lies in pinned host memory whole. From step to step its rows
slide over a shuffled context that is longer than the hot buffer, so that exactly so many are new and were
thrown out long ago. One CUDA graph holds all steps of some layers; what is told is a replay's time over its
calls. At the end, the rows of the last step are compared with the host's, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.events import median_us
from bench.gpu.table import device as about_device
from bench.gpu.table import tell
from kvsieve_connector.kernels.tables import COUNTERS, LayerCache, RequestTables
from kvsieve_store.bench.report import Goal, Report

K = 2048
HOT_ROWS = 4096
BLOCK = 64
LAYERS = 4
"""Of a graph, so that a layer's tables are not those of the call before."""
REPLAYS = 20

CASES = [(batch, misses) for batch in (1, 8, 32) for misses in (0, 274, 614)]
GOALS = {(1, 0): 5.0, (8, 0): 5.0, (1, 274): 14.0}
"""Microseconds per layer, by (batch, misses)."""
FLOOR_GOAL = 1.3
"""Times the link's own time, at batch 32 with 274 misses."""


@dataclass(frozen=True)
class Trace:
    """What `batch` requests ask for. topk: int32 [steps, batch, K] positions. context: tokens of a request,
    whole blocks."""

    batch: int
    misses: int
    context: int
    topk: torch.Tensor

    @property
    def blocks(self) -> int:
        return self.context // BLOCK

    @staticmethod
    def of(batch: int, misses: int, device: torch.device) -> Trace:
        """The steps form a ring: the first follows the last."""
        generator = torch.Generator().manual_seed(batch + 1000 * misses)
        steps = -(-3 * HOT_ROWS // misses) if misses else 8
        ring = max(steps * misses, K)
        context = -(-ring // BLOCK) * BLOCK
        topk = torch.empty(steps, batch, K, dtype=torch.int32)
        for request in range(batch):
            order = torch.randperm(context, generator=generator)[:ring]
            for step in range(steps):
                rows = order[(step * misses + torch.arange(K)) % ring]
                topk[step, request] = rows[torch.randperm(K, generator=generator)].to(torch.int32)
        return Trace(batch, misses, context, topk.to(device))


@dataclass
class Host:
    """Rows in pinned memory: uint8 [LAYERS, pages, BLOCK, row_bytes]; page 0 belongs to nobody.

    Request r's block b is page 1 + r * blocks + b.
    """

    rows: torch.Tensor

    @staticmethod
    def of(trace: Trace, row_bytes: int, pin: bool) -> Host:
        pages = 1 + trace.batch * trace.blocks
        one = torch.randint(0, 256, (pages, BLOCK, row_bytes), dtype=torch.uint8)
        rows = torch.empty(LAYERS, *one.shape, dtype=torch.uint8, pin_memory=pin)
        for layer in range(LAYERS):
            rows[layer] = one.roll(layer, -1)
        return Host(rows)


class Contender:
    """A way to swap in. calls[layer](topk [batch, K]): leaves rows of the layer's cache in out, int32
    [batch, K] of block * BLOCK + row. caches: uint8 [blocks, BLOCK, row_bytes] by layer."""

    out: torch.Tensor
    caches: list[torch.Tensor]
    calls: list[Callable[[torch.Tensor], None]]

    def missed(self) -> float:
        """Rows fetched since the start, of all layers and requests."""
        raise NotImplementedError


class Ours(Contender):
    """kvsieve_connector.kernels, or on a CPU their reference. layers may be replaced between calls."""

    layers: list[LayerCache]

    def __init__(self, trace: Trace, host: Host, device: torch.device) -> None:
        if device.type == "cuda":
            from kvsieve_connector.kernels.swap_in import swap_in
        else:
            from kvsieve_connector.kernels.swap_in_reference import swap_in
        batch, blocks = trace.batch, trace.blocks
        pages, row_bytes = host.rows.shape[1], host.rows.shape[3]
        hot = torch.arange(1, 1 + batch * HOT_ROWS // BLOCK, dtype=torch.int32, device=device)
        page = torch.arange(1, 1 + batch * blocks, dtype=torch.int32, device=device)
        at = host.rows.data_ptr() + torch.arange(pages, dtype=torch.int64) * BLOCK * row_bytes
        tables = RequestTables(
            row_slot=torch.arange(batch, dtype=torch.int32, device=device),
            page=page.view(batch, blocks),
            page_addr=at.to(device),
            hot_blocks=hot.view(1, batch, -1),
        )
        self.out = torch.full((batch, K), -1, dtype=torch.int32, device=device)
        counts = torch.zeros(batch, dtype=torch.int32, device=device)
        block_table = torch.zeros(batch, blocks, dtype=torch.int32, device=device)
        self.counters = torch.zeros(LAYERS, batch, len(COUNTERS), dtype=torch.int64, device=device)
        self.caches, self.calls, self.layers = [], [], []
        for number in range(LAYERS):
            cache = torch.zeros(1 + len(hot), BLOCK, row_bytes, dtype=torch.uint8, device=device)
            layer = LayerCache(
                cache=cache,
                layer_offset=number * host.rows[0].numel(),
                group=0,
                slot_of=torch.full((pages * BLOCK,), -1, dtype=torch.int16, device=device),
                tag=torch.full((batch, HOT_ROWS), -1, dtype=torch.int32, device=device),
                stamp=torch.zeros(batch, HOT_ROWS, dtype=torch.int32, device=device),
                clock=torch.zeros(batch, 2, dtype=torch.int32, device=device),
                counters=self.counters[number],
            )
            self.caches.append(cache)
            self.layers.append(layer)

            def call(topk: torch.Tensor, number: int = number) -> None:
                layer = self.layers[number]
                swap_in(layer, tables, topk, block_table, self.out, counts, query_tokens=1, stride_rows=BLOCK)

            self.calls.append(call)

    def missed(self) -> float:
        return self.count("missed_rows")

    def count(self, name: str) -> float:
        """One of COUNTERS, of all layers and requests."""
        return float(self.counters[..., COUNTERS.index(name)].sum())


class HiSparse(Contender):
    """vLLM's resolver and gather. union_rows: what it sizes its hash table by; K as shipped."""

    def __init__(self, trace: Trace, host: Host, device: torch.device, union_rows: int) -> None:
        from vllm import _custom_ops  # noqa: F401 - registers the ops

        ops = torch.ops._C_cache_ops
        batch, blocks, row_bytes = trace.batch, trace.blocks, host.rows.shape[3]

        def table(*shape: int, value: int = -1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        hot = torch.arange(1, 1 + batch * HOT_ROWS // BLOCK, dtype=torch.int32, device=device)
        hot_table = hot.view(batch, -1)
        source = torch.arange(1, 1 + batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
        requests = torch.arange(batch, dtype=torch.int32, device=device)
        self.stats = torch.zeros(2, dtype=torch.uint64, device=device)
        self.out = table(batch, K)
        device_rows, swap_host, swap_device = table(batch, K), table(batch, K), table(batch, K)
        swap_counts, valid = table(batch, value=0), table(batch, value=0)
        self.caches, self.calls = [], []
        for number in range(LAYERS):
            cache = torch.zeros(1 + len(hot), BLOCK, row_bytes, dtype=torch.uint8, device=device)
            host_cache = host.rows[number].view(-1, row_bytes)
            lru = torch.arange(HOT_ROWS, dtype=torch.int16, device=device).repeat(batch, 1)
            held = table(batch, HOT_ROWS)
            self.caches.append(cache)

            def call(
                topk: torch.Tensor,
                cache: torch.Tensor = cache,
                host_cache: torch.Tensor = host_cache,
                held: torch.Tensor = held,
                lru: torch.Tensor = lru,
            ) -> None:
                ops.hisparse_resolve_residency(
                    host_cache,
                    cache,
                    hot_table,
                    topk,
                    device_rows,
                    held,
                    lru,
                    requests,
                    HOT_ROWS,
                    union_rows,
                    None,
                    self.stats,
                    self.out,
                    BLOCK,
                    requests,
                    source,
                    BLOCK,
                    None,
                    valid,
                    swap_host,
                    swap_device,
                    swap_counts,
                    None,
                    0,
                    0,
                )
                ops.hisparse_gather_compact(host_cache, cache, swap_host, swap_device, swap_counts)

            self.calls.append(call)

    def missed(self) -> float:
        """stats: hits and misses."""
        return float(self.stats.view(torch.int64)[1])


def measure(
    cases: Sequence[tuple[int, int]] = tuple(CASES), *, row_bytes: int = 656, hisparse: bool = True
) -> Report:
    device = torch.device("cuda")
    link = link_gb_s(device)
    rows = []
    for batch, misses in cases:
        trace = Trace.of(batch, misses, device)
        host = Host.of(trace, row_bytes, pin=True)
        floor = batch * misses * row_bytes / link / 1e3
        row: dict[str, Any] = {"batch": batch, "misses": misses, "floor_us": round(floor, 1)}
        makers: dict[str, Callable[[], Contender]] = {"kvsieve": lambda t=trace, h=host: Ours(t, h, device)}
        if hisparse:
            makers["hisparse"] = lambda t=trace, h=host: HiSparse(t, h, device, K)
            makers["hisparse_2k"] = lambda t=trace, h=host: HiSparse(t, h, device, 2 * K)
        for name, make in makers.items():
            us, missed = time_graph(make(), trace, host)
            row[f"{name}_us"] = round(us, 2)
            row[f"{name}_misses"] = round(missed, 1)
            torch.cuda.empty_cache()
        row["of_floor"] = round(row["kvsieve_us"] / floor, 2) if floor else None
        rows.append(row)
        del host
    parameters = {
        "k": K,
        "hot_rows": HOT_ROWS,
        "row_bytes": row_bytes,
        "layers": LAYERS,
        "link_gb_s": round(link, 1),
        **about_device(),
    }
    return Report("gpu-swap-in", parameters, rows, _goals(rows))


def time_graph(contender: Contender, trace: Trace, host: Host) -> tuple[float, float]:
    """Median microseconds of a call in a replayed graph, and rows that a request missed in a call.

    Raises RuntimeError when rows are not the host's.
    """
    steps = list(trace.topk.unbind(0))

    def all_steps() -> None:
        for topk in steps:
            for call in contender.calls:
                call(topk)

    all_steps()  # compiles, fills the hot buffers
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_steps()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    before = contender.missed()
    us = median_us(graph.replay, REPLAYS)
    calls = len(steps) * len(contender.calls)
    missed = (contender.missed() - before) / REPLAYS / calls / trace.batch
    check_rows(contender, trace, host)
    return us / calls, missed


def check_rows(contender: Contender, trace: Trace, host: Host) -> None:
    """The last call was for the last layer and step. Raises RuntimeError unless its rows are the host's."""
    topk, out = trace.topk[-1].cpu().long(), contender.out.cpu().long()
    cache = contender.caches[-1]
    found = cache.view(-1, cache.shape[2])[out.flatten().to(cache.device)].cpu()
    first = 1 + torch.arange(trace.batch).unsqueeze(1) * trace.blocks
    at = (first + topk // BLOCK) * BLOCK + topk % BLOCK
    wanted = host.rows[-1].view(-1, cache.shape[2])[at.flatten()]
    wrong = int((found != wanted).any(1).sum())
    if wrong:
        raise RuntimeError(f"{type(contender).__name__}: {wrong} of {len(wanted)} rows are not the host's")


def link_gb_s(device: torch.device) -> float:
    """Speed of a large copy from pinned host memory."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    us = median_us(lambda: target.copy_(source, non_blocking=True), 8)
    return source.numel() / us / 1e3


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        case = row["batch"], row["misses"]
        what = f"swap-in, batch {case[0]}, {case[1]} misses"
        if limit := GOALS.get(case):
            goals.append(Goal(what, row["kvsieve_us"], limit, "us", at_least=False))
        if case == (32, 274):
            goals.append(
                Goal(f"{what}, of the link's time", row["of_floor"], FLOOR_GOAL, "x", at_least=False)
            )
    return goals


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu swap_in", description=__doc__)
    parser.add_argument("--row-bytes", type=int, default=656, help="656: fp8_ds_mla, 1152: bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 274, 614])
    parser.add_argument("--no-hisparse", action="store_true")
    args = parser.parse_args(arguments)
    cases = [(batch, misses) for batch in args.batches for misses in args.misses]
    tell(measure(cases, row_bytes=args.row_bytes, hisparse=not args.no_hisparse))


if __name__ == "__main__":
    main()
