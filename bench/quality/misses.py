"""Misses of a hot buffer: how much of what a step picks was not picked lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import Tensor

from bench.quality.reference import Picks, picked_blocks

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
        chunks = picked_blocks(query[:, -STEPS:], key, picks, query.shape[-1] ** -0.5)
        for steps in _by_list(mask for _, _, mask in chunks):
            asked += sum(map(len, steps[WARM_UP:]))
            for i, size in enumerate(SIZES):
                missed[i] += _missed(steps, int(size * picks.full_blocks))
    return [count / asked for count in missed]


def _by_list(masks: Iterable[Tensor]) -> list[list[list[int]]]:
    """Per list of blocks (a KV head) and step: which blocks."""
    steps = [mask[:, token] for mask in masks for token in range(mask.shape[1])]
    return [[step[row].nonzero().flatten().tolist() for step in steps] for row in range(len(steps[0]))]


def _missed(steps: Sequence[Sequence[int]], room: int) -> int:
    """Those used longest ago go first."""
    hot: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number, wanted in enumerate(steps):
        missed += sum(block not in hot for block in wanted) if number >= WARM_UP else 0
        for block in wanted:
            hot[block] = None
            hot.move_to_end(block)
        while len(hot) > room:
            hot.popitem(last=False)
    return missed
