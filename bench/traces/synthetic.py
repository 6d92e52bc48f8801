"""Traces with given overlaps, for what no small model shows: other localities, layers that share an index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.traces.trace import Positions, Trace

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """step_overlap, layer_overlap: share of positions common with the step, the layer before.

    share: layers per index; 1: each has its own, 4: one in four, as in GLM-5.2.
    recent: share of k that the newest positions make up.
    back: share of the positions that come in which were there before, as 1 / (steps since then) ** fade.
    skew: the others come in, and all stay, by popularity: rank ** -skew.
    """

    name: str
    step_overlap: float
    layer_overlap: float = 0.8
    share: int = 1
    recent: float = 0.05
    back: float = 0.88
    fade: float = 1.0
    skew: float = 0.5
    steps: int = 257
    layers: int = 8
    k: int = 256
    tokens: int = 12_288
    seed: int = 0


def synthetic(recipe: Recipe) -> Trace:
    """A trace whose overlaps are the recipe's, up to rounding to positions.

    A layer's positions are the newest ones, some that all layers have in common, and some of its own. The
    latter two are drawn from halves of the context; each step a share of them is drawn anew.
    Raises ValueError when the shares do not fit into each other.
    """
    random = np.random.default_rng(recipe.seed)
    k = recipe.k
    recent = round(recipe.recent * k)
    common = round(recipe.layer_overlap * k) - recent
    own = k - recent - common
    kept = round(recipe.step_overlap * k) - max(0, recent - 1)
    if common < 0 or not 0 <= kept <= common + own:
        raise ValueError(
            f"{recipe.name}: {recent} of {k} positions are recent, too many for step_overlap "
            f"{recipe.step_overlap} and layer_overlap {recipe.layer_overlap}"
        )
    kept_common = round(kept * common / (common + own)) if common + own else 0
    halves = np.array_split(random.permutation(recipe.tokens - recipe.steps - recent), 2)
    leaders = tuple(layer - layer % recipe.share for layer in range(recipe.layers))
    chains = {
        layer: _Chain(random.permutation(halves[1]), own, kept - kept_common, recipe, random)
        for layer in leaders
    }
    shared = _Chain(halves[0], common, kept_common, recipe, random)
    start = recipe.tokens - recipe.steps
    topk = np.empty((recipe.steps, recipe.layers, k), np.uint16)
    for step in range(recipe.steps):
        newest = np.arange(start + step + 1 - recent, start + step + 1)
        for_all = np.concatenate([newest, shared.next()])
        picked = {layer: np.sort(np.concatenate([for_all, chain.next()])) for layer, chain in chains.items()}
        for layer, leader in enumerate(leaders):
            topk[step, layer] = picked[leader]
    return Trace(recipe.name, topk, start, 64 * k // 2048, leaders)


class _Chain:
    """A set of `size` positions; each step `kept` of them stay and the others are replaced."""

    def __init__(
        self, positions: Positions, size: int, kept: int, recipe: Recipe, random: np.random.Generator
    ) -> None:
        """positions: what there is to draw from, the most popular first."""
        self._positions = positions
        self._log_weight = -recipe.skew * np.log(np.arange(1, len(positions) + 1))
        self._kept = kept
        self._recipe = recipe
        self._random = random
        self._step = 0
        self._last = np.full(len(positions), -1)  # step in which each was there last; -1: never
        self._ranks = self._draw(np.arange(len(positions)), self._log_weight, size)

    def next(self) -> Positions:
        current = self._positions[self._ranks]
        self._last[self._ranks] = self._step
        self._step += 1
        stay = self._draw(self._ranks, self._log_weight[self._ranks], self._kept)
        gone = np.flatnonzero((self._last >= 0) & (self._last < self._step - 1))
        age = self._step - self._last[gone]
        count = len(self._ranks) - self._kept
        back = self._draw(gone, -self._recipe.fade * np.log(age), round(self._recipe.back * count))
        free = np.ones(len(self._positions), bool)
        free[self._ranks] = free[back] = False
        ranks = np.flatnonzero(free)
        drawn = self._draw(ranks, self._log_weight[ranks], count - len(back))
        self._ranks = np.concatenate([stay, back, drawn])
        return current

    def _draw(self, ranks: Positions, log_weight: Weights, count: int) -> Positions:
        """`count` of `ranks` without replacement, with probabilities as the weights: Gumbel's trick."""
        keys = log_weight + self._random.gumbel(size=len(ranks))
        return ranks[np.argsort(-keys)[:count]]
