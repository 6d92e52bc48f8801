"""Selectors: what is kept of a block's keys, and which blocks a query then attends to.

A selector keeps one summary per block and KV head, made when the block fills. A score is a dot product of the
summary with features of the query: the estimated logarithm of the attention mass that the block would get.
The query heads of a KV head share its blocks: their estimated masses are added.

docs/decisions/0019-block-selector.md says which selector is the default, and why.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Selector(ABC):
    """dim: of a head. scale: of the attention's logits; None: dim ** -0.5."""

    name: str
    parts: int
    """Summary vectors of `dim` floats per block and KV head."""

    def __init__(self, dim: int, scale: float | None = None):
        self.scale = dim**-0.5 if scale is None else scale
        self.width = self.parts * dim
        """Floats of a summary, per block and KV head."""

    @abstractmethod
    def summarise(self, keys: Tensor) -> Tensor:
        """keys: [n, tokens, heads, dim], of full blocks, as attention reads them. Returns [n, heads, width]
        float32; a narrower copy of it may be kept."""

    @abstractmethod
    def features(self, query: Tensor) -> Tensor:
        """query: [..., dim] float32, scaled. Returns [..., width]: what a summary is multiplied with."""

    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        """query: [heads, group, dim]. summaries: [n, heads, width]. Returns [n, heads, group] float32."""
        features = self.features(query.float() * self.scale)
        return torch.einsum("hgw,nhw->nhg", features, summaries.float())

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """One request's query heads, grouped by KV head, against all of its blocks at once.

        query: [heads, group, dim]. summaries: [n, heads, width]. Returns [n, heads] float32: the logarithm of
        the blocks' estimated shares of the attention, added over the group.
        """
        return self.logits(query, summaries).log_softmax(dim=0).logsumexp(dim=-1)


class QuestBounds(Selector):
    """Least and greatest of each channel: an upper bound of every logit in the block (Quest, 2406.10774)."""

    name = "quest-bounds"
    parts = 2

    def summarise(self, keys: Tensor) -> Tensor:
        least, greatest = keys.float().aminmax(dim=1)
        return torch.cat([least, greatest], dim=-1)

    def features(self, query: Tensor) -> Tensor:
        return torch.cat([query.clamp(max=0), query.clamp(min=0)], dim=-1)


class MeanKey(Selector):
    """The mean key: a lower bound of the logarithm of the block's mean weight (Jensen)."""

    name = "mean-key"
    parts = 1

    def summarise(self, keys: Tensor) -> Tensor:
        return keys.float().mean(dim=1)

    def features(self, query: Tensor) -> Tensor:
        return query


class MeanSpread(Selector):
    """Mean and variance of each channel: the logarithm of the block's mean weight to the second order.

    Exact for normal keys with independent channels: log E[exp(q k)] = q mean + q^2 variance / 2.
    """

    name = "mean-spread"
    parts = 2

    def summarise(self, keys: Tensor) -> Tensor:
        variance, mean = torch.var_mean(keys.float(), dim=1, correction=0)
        return torch.cat([mean, variance], dim=-1)

    def features(self, query: Tensor) -> Tensor:
        return torch.cat([query, query.square() / 2], dim=-1)


SELECTORS: dict[str, type[Selector]] = {each.name: each for each in (QuestBounds, MeanKey, MeanSpread)}


def make_selector(name: str, dim: int, scale: float | None = None) -> Selector:
    """The selector of that name, a key of SELECTORS. Raises ValueError for another."""
    if name not in SELECTORS:
        near = difflib.get_close_matches(name, SELECTORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SELECTORS)}"
        raise ValueError(f"no selector {name!r}; {hint}")
    return SELECTORS[name](dim, scale)


def share(scores: Tensor) -> Tensor:
    """Scores of one list for all KV heads, [n, 1], from scores per KV head, [n, heads]: masses added."""
    return scores.logsumexp(dim=-1, keepdim=True)


def select(scores: Tensor, budget_blocks: int, first: int, newest: int) -> Tensor:
    """The `first` and the `newest` of n blocks, and of the rest the `budget_blocks` with the highest scores.

    scores: [n, lists]: a column per KV head, or what share() makes of them. -inf: never before another one.
    Returns [m, lists] int64, each column ascending, m = min(n, first + budget_blocks + newest). Of equal
    scores the device's topk decides. Raises ValueError for a negative count.
    """
    if min(budget_blocks, first, newest) < 0:
        raise ValueError(
            f"budget_blocks {budget_blocks}, first {first}, newest {newest}: none may be below 0"
        )
    n = len(scores)
    kept = scores.clone()
    kept[:first] = torch.inf
    kept[max(0, n - newest) :] = torch.inf
    return kept.topk(min(n, first + budget_blocks + newest), dim=0).indices.sort(dim=0).values
