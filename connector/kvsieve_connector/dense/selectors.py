"""Selectors: what is kept of a block's keys, and which blocks a query then attends to.

A selector keeps one summary per block and KV head, made when the block fills. From it and a query it
estimates the logit that stands for the block. The query heads of a KV head share its blocks: the attention
that each would give a block is added.

docs/decisions/0019-block-selector.md and 0024-part-means.md say which selector is the default, and why.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvsieve_connector.kernels.block_tables import vectors_of


class Selector(ABC):
    """dim: of a head. block_tokens: of a block. scale: of the attention's logits; None: dim ** -0.5."""

    name: str

    def __init__(self, dim: int, block_tokens: int, scale: float | None = None):
        self.scale = dim**-0.5 if scale is None else scale
        self.vectors = vectors_of(self.name, block_tokens)
        self.width = self.vectors * dim
        """Floats of a summary, per block and KV head."""

    @abstractmethod
    def summarise(self, keys: Tensor) -> Tensor:
        """keys: [n, block_tokens, heads, dim], of full blocks, as attention reads them. Returns
        [n, heads, width] float32; a narrower copy of it may be kept."""

    @abstractmethod
    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        """query: [heads, group, dim]. summaries: [n, heads, width]. Returns [n, heads, group] float32."""

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """One request's query heads, grouped by KV head, against all of its blocks at once.

        query: [heads, group, dim]. summaries: [n, heads, width]. Returns [n, heads] float32: the logarithm of
        the blocks' estimated shares of the attention, added over the group.
        """
        return self.logits(query, summaries).log_softmax(dim=0).logsumexp(dim=-1)


class QuestBounds(Selector):
    """Least and greatest of each channel: an upper bound of every logit in the block (Quest, 2406.10774)."""

    name = "quest-bounds"

    def summarise(self, keys: Tensor) -> Tensor:
        return torch.cat(keys.float().aminmax(dim=1), dim=-1)

    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        scaled = query.float() * self.scale
        return _dot(torch.cat([scaled.clamp(max=0), scaled.clamp(min=0)], dim=-1), summaries)


class MeanKey(Selector):
    """The mean key: a lower bound of the logarithm of the block's mean weight (Jensen)."""

    name = "mean-key"

    def summarise(self, keys: Tensor) -> Tensor:
        return keys.float().mean(dim=1)

    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        return _dot(query.float() * self.scale, summaries)


class MeanOutlier(Selector):
    """The mean key, and the key that is furthest from it in any one channel, exactly.

    What a mean hides is mostly one key that many queries look for. The block's logit is that of the weighted
    mean weight of the two; the mean counts MEAN_WEIGHT times.
    """

    name = "mean-outlier"

    MEAN_WEIGHT = 64
    """About a block's tokens. From 16 to 256 it makes next to no difference, for blocks of 16 to 128."""

    def summarise(self, keys: Tensor) -> Tensor:
        keys = keys.float()
        mean = keys.mean(dim=1, keepdim=True)
        furthest = (keys - mean).abs().amax(dim=-1, keepdim=True).argmax(dim=1, keepdim=True)
        outlier = keys.take_along_dim(furthest, dim=1)
        return torch.cat([mean, outlier], dim=-1)[:, 0]

    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        scaled = query.float() * self.scale
        means, outliers = summaries.chunk(2, dim=-1)
        total = math.log1p(self.MEAN_WEIGHT)
        return torch.logaddexp(
            _dot(scaled, means) + math.log(self.MEAN_WEIGHT) - total, _dot(scaled, outliers) - total
        )


class PartMeans(Selector):
    """The mean keys of runs of neighbouring tokens, as long as each other: of four tokens, or of more where
    the number of runs were no power of two, or more than 16.

    The block's logit is that of its mean weight if all keys of a part were its mean: a lower bound, and one
    that is closer than the mean key's.
    """

    name = "part-means"

    def summarise(self, keys: Tensor) -> Tensor:
        n, tokens, heads, dim = keys.shape
        keys = keys.float()
        if tokens % self.vectors:  # parts that end inside a token
            keys = keys.repeat_interleave(self.vectors, dim=1)
        parts = keys.reshape(n, self.vectors, -1, heads, dim).mean(dim=2)
        return parts.transpose(1, 2).reshape(n, heads, self.width)

    def logits(self, query: Tensor, summaries: Tensor) -> Tensor:
        scaled = query.float() * self.scale
        logits = [_dot(scaled, part) for part in summaries.float().chunk(self.vectors, dim=-1)]
        return torch.stack(logits).logsumexp(dim=0) - math.log(self.vectors)


def _dot(features: Tensor, summaries: Tensor) -> Tensor:
    """[heads, group, c] and [n, heads, c] to [n, heads, group]."""
    return torch.einsum("hgc,nhc->nhg", features, summaries.float())


SELECTORS: dict[str, type[Selector]] = {
    each.name: each for each in (QuestBounds, MeanKey, MeanOutlier, PartMeans)
}


DEFAULT = PartMeans.name


def make_selector(name: str, dim: int, block_tokens: int, scale: float | None = None) -> Selector:
    """The selector of that name, a key of SELECTORS, for blocks of that size. Raises ValueError for a
    name of none."""
    if name not in SELECTORS:
        near = difflib.get_close_matches(name, SELECTORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SELECTORS)}"
        raise ValueError(f"no selector {name!r}; {hint}")
    return SELECTORS[name](dim, block_tokens, scale)


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
