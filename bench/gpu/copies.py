"""Copies between the paged cache and the arena, by size of the piece: DMA against the kernel.

Besides the speed, what the copies cost the model: how much longer matrix products take beside them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.gpu.table import device as about_device
from bench.gpu.table import tell
from kvsieve_connector.copy.pieces import Pieces, Way, by_dma, by_kernel
from kvsieve_store.bench.report import Report

SIZES = (8_448, 41_984, 83_968, 125_952, 503_808, 2 << 20)
"""Bytes: an indexer layer's block, one to three main layers' and twelve, and more."""
TOTAL = 128 << 20
REPETITIONS = 9

_WAYS: dict[str, Way] = {"dma": by_dma, "kernel": by_kernel}


def measure(sizes: Sequence[int] = SIZES) -> Report:
    device = torch.device("cuda")
    cache = torch.randint(0, 256, (2 * TOTAL,), dtype=torch.uint8, device=device)
    arena = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[0])
    alone = _products(None, device)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        pieces = _pieces(cache, arena, size)
        row: dict[str, Any] = {"piece_bytes": size, "pieces": len(pieces.sizes)}
        for name, way in _WAYS.items():
            for direction, these in (("to_host", pieces), ("from_host", pieces.reversed())):
                row[f"{name}_{direction}_gb_s"] = round(_speed(way, these, stream, device), 2)
            beside = _products(lambda w=way, p=pieces: _launch(w, p, stream, device), device)
            row[f"{name}_products_slower"] = round(beside / alone - 1, 3)
        rows.append(row)
    parameters = {"bytes": TOTAL, "repetitions": REPETITIONS, **about_device()}
    return Report("gpu-copies", parameters, rows)


def _pieces(cache: torch.Tensor, arena: torch.Tensor, size: int) -> Pieces:
    """Pieces that lie apart in the cache, in no order, and one after another in the arena."""
    count = TOTAL // size
    places = np.random.default_rng(size).permutation(count)
    return Pieces(
        cache.data_ptr() + 2 * size * places,
        arena.data_ptr() + size * np.arange(count),
        np.full(count, size),
    )


def _launch(way: Way, pieces: Pieces, stream: torch.cuda.Stream, device: torch.device) -> None:
    with torch.cuda.stream(stream):
        way(pieces, device)


def _speed(way: Way, pieces: Pieces, stream: torch.cuda.Stream, device: torch.device) -> float:
    """GB/s on the device; submitting is part of it where the device waits for that."""
    speeds = []
    for _ in range(REPETITIONS):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begun.record()
            way(pieces, device)
            done.record()
        done.synchronize()
        speeds.append(pieces.copied / begun.elapsed_time(done) / 1e6)
    return statistics.median(speeds[1:])


def _products(beside: Any, device: torch.device) -> float:
    """Milliseconds of some matrix products while beside() has launched copies; None: alone."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        if beside is not None:
            beside()
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        for _ in range(8):  # 8 x 0.18 ms: shorter than the copies
            a @ a
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done))
    return statistics.median(times[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu copies", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes, multiples of 16")
    args = parser.parse_args(arguments)
    tell(measure(args.sizes))


if __name__ == "__main__":
    main()
