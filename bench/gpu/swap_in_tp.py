"""Time to bring a layer's missing rows into the hot buffers of all GPUs of a host, as in tensor parallelism.

All of them ask for the same rows of the same pinned memory at once: each fetches all that it misses, or its
share, and reads the others' from their GPUs. One process; a CUDA graph on each GPU, replayed at once. Traces
and layers are those of `swap_in`; what is told is the slowest GPU's time. At the end, the rows of the last
step are compared with the host's on each.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.swap_in import CASES, HOT_ROWS, LAYERS, REPLAYS, Host, K, Ours, Trace, check_rows, link_gb_s
from bench.gpu.table import device as about_device
from bench.gpu.table import tell
from kvsieve_connector.kernels.tables import Peers
from kvsieve_store.bench.report import Report

PATIENCE_NS = 2_000_000_000
"""No rank gives another up: waiting for each other's rows keeps graphs without all-reduces in step."""


def join(ranks: Sequence[Ours]) -> None:
    """From now on the ranks fetch for one another. Their GPUs reach one another."""
    count, batch = len(ranks), ranks[0].counters.shape[1]
    devices = [rank.counters.device for rank in ranks]
    flags = [torch.zeros(LAYERS, batch, count, dtype=torch.int64, device=device) for device in devices]
    mark = [torch.zeros(1, dtype=torch.int64, device=device) for device in devices]
    silent = [torch.zeros(count, dtype=torch.int32, device=device) for device in devices]
    for number in range(LAYERS):
        layers = [rank.layers[number] for rank in ranks]
        places = torch.tensor(
            [
                [layer.cache.data_ptr(), layer.slot_of.data_ptr(), own[number].data_ptr()]
                for layer, own in zip(layers, flags, strict=True)
            ]
        )
        for i, rank in enumerate(ranks):
            there = places.to(devices[i])
            peers = Peers(i, there, flags[i][number], mark[i], silent[i], PATIENCE_NS)
            rank.layers[number] = replace(layers[i], peers=peers)


def measure(cases: Sequence[tuple[int, int]] = tuple(CASES), *, row_bytes: int = 656) -> Report:
    """On all GPUs of the host, two at least. Raises RuntimeError when rows are not the host's."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    _reach(devices)
    link = link_gb_s(devices[0])
    rows = []
    for batch, misses in cases:
        row: dict[str, Any] = {"batch": batch, "misses": misses}
        row["floor_us"] = round(batch * misses * row_bytes / link / 1e3, 1)
        traces = [Trace.of(batch, misses, device) for device in devices]
        host = Host.of(traces[0], row_bytes, pin=True)
        for name in ("plain", "sharded"):
            ranks = [Ours(trace, host, device) for trace, device in zip(traces, devices, strict=True)]
            if name == "sharded":
                join(ranks)
            us = time_graphs(ranks, traces, host)
            row[f"{name}_us"] = round(us, 2)
            row[f"{name}_gb_s"] = round(batch * misses * row_bytes / us / 1e3, 1)
            if name == "sharded" and misses:
                row["peer_share"] = round(ranks[0].count("peer_rows") / ranks[0].missed(), 3)
                row["late_rows"] = sum(rank.count("late_rows") for rank in ranks)
            del ranks
            torch.cuda.empty_cache()
        row["speedup"] = round(row["plain_us"] / row["sharded_us"], 2)
        rows.append(row)
        del host
    parameters = {
        "k": K,
        "hot_rows": HOT_ROWS,
        "row_bytes": row_bytes,
        "layers": LAYERS,
        "gpus": len(devices),
        "link_gb_s": round(link, 1),
        **about_device(),
    }
    return Report("gpu-swap-in-tp", parameters, rows, [])


def time_graphs(ranks: Sequence[Ours], traces: Sequence[Trace], host: Host) -> float:
    """Median microseconds of a call on the slowest GPU, all of them at once."""
    devices = [rank.counters.device for rank in ranks]
    steps = len(traces[0].topk)

    def settle() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def each(work: Callable[[int], None]) -> None:
        for i, device in enumerate(devices):
            with torch.cuda.device(device):
                work(i)

    def load(i: int) -> None:
        ranks[i].calls[0](torch.full_like(traces[i].topk[0], -1))
        torch.cuda.synchronize()

    each(load)  # compiles, too, while no other rank waits
    for step in range(steps):  # fills the hot buffers; no rank may be a call ahead
        for call in range(LAYERS):
            each(lambda i, step=step, call=call: ranks[i].calls[call](traces[i].topk[step]))
            settle()
    graphs = []
    for rank, trace in zip(ranks, traces, strict=True):
        with torch.cuda.device(rank.counters.device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                for topk in trace.topk.unbind(0):
                    for run in rank.calls:
                        run(topk)
            graphs.append(graph)
    settle()
    for _ in range(3):
        each(lambda i: graphs[i].replay())
        settle()
    times = []
    for _ in range(REPLAYS):
        events: list[list[torch.cuda.Event]] = []

        def replay(i: int, events: list[list[torch.cuda.Event]] = events) -> None:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            graphs[i].replay()
            pair[1].record()
            events.append(pair)

        each(replay)
        settle()
        times.append(max(begun.elapsed_time(done) for begun, done in events) * 1e3)
    for rank, trace in zip(ranks, traces, strict=True):
        check_rows(rank, trace, host)
    return statistics.median(times) / steps / LAYERS


def _reach(devices: Sequence[torch.device]) -> None:
    import cupy

    for device in devices:
        for other in devices:
            if other == device:
                continue
            if not torch.cuda.can_device_access_peer(device, other):
                raise RuntimeError(f"{device} does not reach {other}")
            with torch.cuda.device(device), contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.deviceEnablePeerAccess(other.index)  # fails where it is already


def main(arguments: Sequence[str] | None = None) -> None:
    """On a host with one GPU it says so, and does nothing."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu swap_in_tp", description=__doc__)
    parser.add_argument("--row-bytes", type=int, default=656, help="656: fp8_ds_mla, 1152: bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 274, 614])
    args = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        print("swap_in_tp: needs two GPUs or more")
        return
    cases = [(batch, misses) for batch in args.batches for misses in args.misses]
    tell(measure(cases, row_bytes=args.row_bytes))


if __name__ == "__main__":
    main()
