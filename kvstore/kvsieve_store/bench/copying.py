"""Blocks in and out of the arena, against memcpy of the same bytes between private memory."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve_store.bench.blocks import pool
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.saving import ATTACH_SECONDS
from kvsieve_store.client import ArenaMap, SlotRef, StoreClient
from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import PoolSpec

_RATIO = 0.9
_SHARD = 0

Copy = Callable[[], None]


@dataclass(frozen=True)
class Geometry:
    """What a block is made of: `pieces` of `piece_bytes` each, copied one by one."""

    name: str
    pieces: int
    piece_bytes: int


GEOMETRIES = (
    Geometry("SmolLM2-135M, 32 tokens, by layer", 30, 98_304),
    Geometry("SmolLM2-135M, 32 tokens, whole block", 1, 30 * 98_304),
    Geometry("Llama-3-8B, 16 tokens, by layer", 32, 65_536),
    Geometry("DeepSeek-V3 (MLA), 64 tokens, by layer", 61, 73_728),
    Geometry("DeepSeek-V3 (MLA), 16 tokens, by layer", 61, 18_432),
)


def measure(
    endpoint: str,
    *,
    working_set: int = 192 << 20,
    repetitions: int = 15,
    geometries: Sequence[Geometry] = GEOMETRIES,
) -> Report:
    """Bytes/s through ArenaMap as a share of memcpy's, medians over interleaved repetitions.

    working_set: bytes of the blocks that each repetition copies; more than the caches hold.
    """
    rows = [_measure_one(endpoint, geometry, working_set, repetitions) for geometry in geometries]
    parameters = {"working_set_bytes": working_set, "repetitions": repetitions}
    goals = [
        Goal(f"block {way} against memcpy in the same pieces, worst geometry", worst, _RATIO, "x")
        for way in ("write", "read")
        for worst in [min(row[f"{way}_vs_pieces"] for row in rows)]
    ]
    return Report("copy", parameters, rows, goals)


def _measure_one(endpoint: str, geometry: Geometry, working_set: int, repetitions: int) -> dict[str, Any]:
    blocks = max(working_set // (geometry.pieces * geometry.piece_bytes), 1)
    spec = pool(f"copy-{geometry.pieces}x{geometry.piece_bytes}", [geometry.piece_bytes] * geometry.pieces)
    with StoreClient(endpoint, spec, engine_id="bench-copy", credit_target=0) as client:
        with ArenaMap(client.wait_attached(ATTACH_SECONDS)) as arena:
            client.reserve(blocks)
            refs = client.take_credits(blocks)
            if len(refs) < blocks:
                raise CapacityError(f"bench: {blocks} slots needed, {len(refs)} granted")
            times = _run(_copies(geometry, spec, refs, arena), repetitions)
        client.release(refs=refs)
    total = blocks * geometry.pieces * geometry.piece_bytes
    row: dict[str, Any] = {"geometry": geometry.name, "piece_bytes": geometry.piece_bytes, "blocks": blocks}
    for way in ("write", "read"):
        row[f"{way}_gb_s"] = round(total / statistics.median(times[way]) / 1e9, 2)
        for reference in ("pieces", "flat"):
            ratios = [r / a for a, r in zip(times[way], times[f"{way} {reference}"], strict=True)]
            row[f"{way}_vs_{reference}"] = round(statistics.median(ratios), 3)
    return row


def _copies(geometry: Geometry, spec: PoolSpec, refs: Sequence[SlotRef], arena: ArenaMap) -> dict[str, Copy]:
    """What is timed. The engine's cache and the references are private memory, written to beforehand.

    "write", "read": as the connector's CPU copy engine does them, which saves layer by layer, with the words
    that say how far it is, and loads block by block. "... pieces": the same loop and pieces, from and to
    private memory instead of the arena. "... flat": one memcpy of all the bytes.
    """
    size, count = geometry.piece_bytes, len(refs)
    offsets = SlotLayout.of(spec).layer_offsets[0][_SHARD]
    cache, private = (np.full(count * geometry.pieces * size, fill, np.uint8) for fill in (1, 2))
    for ref in refs:
        arena.slot(ref.slot)[:] = 3
    # Layer after layer, as engines keep their caches; blocks one after the other, as the arena keeps its.
    pages = [cache.ctypes.data + layer * count * size for layer in range(geometry.pieces)]
    slot_bytes = geometry.pieces * size
    base = private.ctypes.data
    memmove = ctypes.memmove

    def write() -> None:
        for layer, (page, offset) in enumerate(zip(pages, offsets, strict=True), start=1):
            for i, ref in enumerate(refs):
                memmove(arena.address(ref.slot) + offset, page + i * size, size)
                arena.set_layers_done(ref.slot, _SHARD, layer)

    def read() -> None:
        for i, ref in enumerate(refs):
            at = arena.address(ref.slot)
            for page, offset in zip(pages, offsets, strict=True):
                memmove(page + i * size, at + offset, size)

    def write_pieces() -> None:
        for layer, page in enumerate(pages):
            for i in range(count):
                memmove(base + i * slot_bytes + layer * size, page + i * size, size)

    def read_pieces() -> None:
        for i in range(count):
            at = base + i * slot_bytes
            for layer, page in enumerate(pages):
                memmove(page + i * size, at + layer * size, size)

    return {
        "write": write,
        "write pieces": write_pieces,
        "write flat": lambda: np.copyto(private, cache),
        "read": read,
        "read pieces": read_pieces,
        "read flat": lambda: np.copyto(cache, private),
    }


def _run(copies: dict[str, Copy], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each, in turns; every other turn backwards, so that no one always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in copies}
    for turn in range(repetitions + 1):
        for name in list(copies) if turn % 2 else reversed(copies):
            started = time.perf_counter()
            copies[name]()
            seconds = time.perf_counter() - started
            if turn:  # the first turn warms up
                times[name].append(seconds)
    return times
