"""Blocks of a model as engines of any TP size hold them: sliced by heads from the model's whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import Plane, PoolSpec


@dataclass(frozen=True)
class Model:
    """A plane of a model, whole. heads, runs: as in Plane; 0 heads: replicated. run_bytes: per layer."""

    name: str
    heads: int
    runs: int
    run_bytes: tuple[int, ...]

    def content(self, seed: int) -> list[np.ndarray]:
        """Per layer: uint8 [runs, heads, run_bytes]."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, (self.runs or 1, self.heads or 1, n), np.uint8) for n in self.run_bytes]

    def plane(self, tp: int) -> Plane:
        """As the ranks of an engine of this TP size hold it."""
        if not self.heads:
            return Plane(self.name, self.run_bytes)
        part = self.runs * max(1, self.heads // tp)
        return Plane(self.name, tuple(part * n for n in self.run_bytes), tp, self.heads, self.runs)

    def shards(self, tp: int, content: list[np.ndarray]) -> list[bytes]:
        """Each rank's bytes: heads as vLLM's QKVParallelLinear deals them out."""
        if not self.heads:
            return [b"".join(layer.tobytes() for layer in content)]
        shards = []
        for rank in range(tp):
            if tp >= self.heads:
                mine = [rank // (tp // self.heads)]
            else:
                each = self.heads // tp
                mine = list(range(rank * each, (rank + 1) * each))
            shards.append(b"".join(layer[:, mine].tobytes() for layer in content))
        return shards


def spec_of(models: Sequence[Model], tp: int) -> PoolSpec:
    planes = tuple(model.plane(tp) for model in models)
    size = max(plane.shards for plane in planes)
    return PoolSpec("p", "m", "bfloat16", 16, "sha256", "0", "x", size, planes)


def slot_of(models: Sequence[Model], tp: int, fill: int = 0, block: int = 0) -> np.ndarray:
    """The block of this number in a slot, uint8 [slot_bytes]; padding is `fill`."""
    spec = spec_of(models, tp)
    layout = SlotLayout.of(spec)
    slot = np.full(layout.slot_bytes, fill, np.uint8)
    for n, model in enumerate(models):
        shards = model.shards(tp, model.content(1000 * block + n))
        assert len(shards) == spec.planes[n].shards
        for offsets, raw in zip(layout.layer_offsets[n], shards, strict=True):
            slot[offsets[0] : offsets[0] + len(raw)] = np.frombuffer(raw, np.uint8)
    return slot
