"""Misses of a hot buffer: how much of what a step picks was not picked lately."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bench.quality.reference import Picks, picked_blocks
from bench.traces.hot_buffer import Lru

SIZES = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Of a hot buffer, times what a step attends to at most, in full blocks."""
STEPS, WARM_UP = 256, 16
EVERY = 4
"""Layers."""


def misses(layers: Sequence[tuple[Tensor, Tensor]], picks: Picks) -> list[float]:
    """Shares of the picks of the last STEPS tokens but the first WARM_UP that a buffer of each of SIZES
    misses, where none of a request's blocks are in the pool. layers: as recall.attended() gives them; each
    EVERYth counts.
    """
    asked, missed = 0, [0] * len(SIZES)
    for query, key in layers[::EVERY]:
        chunks = list(picked_blocks(query[:, -STEPS:], key, picks, query.shape[-1] ** -0.5))
        steps = [step for _, _, mask in chunks for step in mask.unbind(1)]
        for head in range(len(steps[0])):
            buffers = [Lru(int(size * picks.full_blocks), steps[-1].shape[1]) for size in SIZES]
            for number, step in enumerate(steps):
                wanted = step[head].nonzero().flatten().numpy()
                counted = number >= WARM_UP
                asked += counted * len(wanted)
                for i, buffer in enumerate(buffers):
                    missed[i] += counted * buffer.swap_in(wanted)[0]
    return [count / asked for count in missed]
