"""Selectors of the dense sparse tier: what their scores promise, and which blocks are picked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsieve_connector.dense.selectors import SELECTORS, QuestBounds, make_selector, select, share

NAMES = sorted(SELECTORS)


def some_keys(seed: int, n: int, tokens: int, heads: int = 2, dim: int = 8) -> Tensor:
    return torch.randn(n, tokens, heads, dim, generator=torch.Generator().manual_seed(seed)) * 3


def some_query(seed: int, heads: int = 2, group: int = 3, dim: int = 8) -> Tensor:
    return torch.randn(heads, group, dim, generator=torch.Generator().manual_seed(seed + 1)) * 3


def exact_logits(query: Tensor, keys: Tensor) -> Tensor:
    """[n, tokens, heads, group]."""
    return torch.einsum("hgd,nthd->nthg", query, keys) * query.shape[-1] ** -0.5


shapes = {"seed": st.integers(0, 1000), "n": st.integers(1, 12), "tokens": st.integers(1, 35)}


# Scores


@given(**shapes)
def test_bounds_are_upper_bounds(seed: int, n: int, tokens: int) -> None:
    keys, query = some_keys(seed, n, tokens), some_query(seed)
    selector = make_selector("quest-bounds", 8, tokens)
    bounds = selector.logits(query, selector.summarise(keys))
    assert torch.all(bounds >= exact_logits(query, keys).amax(dim=1) - 1e-4)


@given(**shapes)
def test_means_are_lower_bounds_of_the_mass_those_of_parts_closer_ones(
    seed: int, n: int, tokens: int
) -> None:
    keys, query = some_keys(seed, n, tokens), some_query(seed)
    mass = exact_logits(query, keys).logsumexp(dim=1) - math.log(tokens)
    mean, parts = (
        selector.logits(query, selector.summarise(keys))
        for selector in (make_selector(name, 8, tokens) for name in ("mean-key", "part-means"))
    )
    assert torch.all(mean <= parts + 1e-4)
    assert torch.all(parts <= mass + 1e-4)


@given(seed=st.integers(0, 1000), n=st.integers(1, 12), tokens=st.sampled_from([4, 8, 16, 32, 48, 128]))
def test_parts_are_exact_where_the_keys_of_each_are_alike(seed: int, n: int, tokens: int) -> None:
    query, selector = some_query(seed), make_selector("part-means", 8, tokens)
    parts = selector.vectors
    keys = some_keys(seed, n, parts).repeat_interleave(tokens // parts, dim=1)
    mass = exact_logits(query, keys).logsumexp(dim=1) - math.log(tokens)
    assert torch.allclose(selector.logits(query, selector.summarise(keys)), mass, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "parts"), [(1, 1), (4, 1), (8, 2), (16, 4), (32, 8), (48, 8), (64, 16), (96, 16), (128, 16)]
)
def test_parts_of_four_tokens(tokens: int, parts: int) -> None:
    """More tokens where the number of parts were no power of two, or more than 16: what kernels multiply."""
    assert make_selector("part-means", 8, tokens).vectors == parts


def test_one_key_that_stands_out_is_seen() -> None:
    """Its block comes first for the queries that look for it, though the block's mean says nothing."""
    keys = some_keys(0, 12, 32, heads=1) / 10
    keys[5, 17] = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, -9])
    query = keys[5, 17].view(1, 1, 8)
    selector = make_selector("mean-outlier", 8, 32)
    assert selector.score(query, selector.summarise(keys)).argmax() == 5


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000), n=st.integers(1, 12))
def test_exact_when_blocks_hold_one_token(name: str, seed: int, n: int) -> None:
    keys, query = some_keys(seed, n, 1), some_query(seed)
    selector = make_selector(name, 8, 1)
    summaries = selector.summarise(keys)
    assert summaries.shape == (n, 2, selector.width)
    exact = exact_logits(query, keys)[:, 0]
    assert torch.allclose(selector.logits(query, summaries), exact, atol=1e-4)
    weights = exact.softmax(dim=0).sum(dim=-1)
    assert torch.allclose(selector.score(query, summaries).exp(), weights, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_and_extremes_make_no_nan(name: str, dtype: torch.dtype) -> None:
    keys = torch.cat([torch.zeros(3, 4, 2, 8), some_keys(0, 5, 4) * 100]).to(dtype)
    selector = make_selector(name, 8, 4)
    scores = selector.score(some_query(0).to(dtype) * 100, selector.summarise(keys))
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert select(share(scores), 2, 1, 1).shape == (4, 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_blocks(name: str) -> None:
    selector = make_selector(name, 8, 16)
    scores = selector.score(some_query(0), torch.empty(0, 2, selector.width))
    assert scores.shape == (0, 2)
    assert select(scores, 4, 1, 2).shape == (0, 2)


def test_a_head_that_looks_elsewhere_adds_little() -> None:
    """The group's query heads vote with shares of their attention: large logits alone win nothing."""
    selector = QuestBounds(2, 1, scale=1.0)
    keys = torch.tensor([[9.0, 0], [0, 1], [1, 0]]).view(3, 1, 1, 2)
    query = torch.tensor([[[9.0, 0], [0, 9.0]]])  # the first sees 81, 0, 9; the second 0, 9, 0
    scores = selector.score(query, selector.summarise(keys))[:, 0]
    assert scores.argsort(descending=True).tolist() == [0, 1, 2]


def test_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'quest-bounds'"):
        make_selector("quest-bound", 8, 16)


# Selection


@given(
    seed=st.integers(0, 1000),
    n=st.integers(0, 20),
    lists=st.integers(1, 3),
    budget=st.integers(0, 25),
    first=st.integers(0, 4),
    newest=st.integers(0, 4),
)
def test_select(seed: int, n: int, lists: int, budget: int, first: int, newest: int) -> None:
    # Few values: ties.
    scores = torch.randint(0, 4, (n, lists), generator=torch.Generator().manual_seed(seed)).float()
    scores[torch.rand(n, lists, generator=torch.Generator().manual_seed(seed)) < 0.2] = -torch.inf
    before = scores.clone()
    picked = select(scores, budget, first, newest)
    assert torch.equal(scores, before)
    assert picked.dtype == torch.int64
    assert picked.shape == (min(n, first + budget + newest), lists)
    always = {*range(min(first, n)), *range(max(0, n - newest), n)}
    for column in range(lists):
        chosen = picked[:, column].tolist()
        assert chosen == sorted(set(chosen))
        assert always <= set(chosen)
        left_out = [i for i in range(n) if i not in chosen]
        by_score = [i for i in chosen if i not in always]
        if left_out and by_score:
            assert scores[by_score, column].min() >= scores[left_out, column].max()


def test_a_budget_of_all_blocks_takes_all() -> None:
    scores = torch.randn(7, 2)
    assert select(scores, 7, 0, 0).T.tolist() == [list(range(7))] * 2
    assert select(scores, 100, 1, 2).T.tolist() == [list(range(7))] * 2


def test_shared_scores_add_masses() -> None:
    scores = torch.tensor([[0.5, 0.1], [0.2, 0.7], [0.3, 0.2]]).log()
    assert torch.allclose(share(scores)[:, 0].exp(), torch.tensor([0.6, 0.9, 0.5]))
    assert select(share(scores), 2, 0, 0).tolist() == [[0], [1]]


def test_select_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="newest -1"):
        select(torch.zeros(3, 1), 1, 1, -1)
