"""Top-k recall: how much of the exact attention lies in the blocks that are picked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.quality.reference import BLOCK_TOKENS, FIRST, NEWEST
from kvsieve_connector.dense.selectors import SELECTORS, make_selector, select, share

ORACLE = "oracle"
WINDOW = "newest blocks"
NAMES = (*SELECTORS, ORACLE, WINDOW)
"""Selectors; beside them, picking by the exact attention of each block, and the newest blocks."""


def recall(
    query: Tensor, key: Tensor, scale: float, budgets: Sequence[int], stride: int = 24, steps: int = 385
) -> npt.NDArray[np.float64]:
    """Of one layer, over every `stride`th of the last `steps` tokens, means over query heads and tokens.

    query: [heads, tokens, dim], key: [KV heads, tokens, dim], float32. budgets: tokens.
    Returns [len(NAMES), 2, len(budgets)]: shares of the attention; a list per KV head, then one for all.
    """
    tokens, dim = query.shape[1:]
    kv_heads = len(key)
    full = tokens // BLOCK_TOKENS
    blocks = key[:, : full * BLOCK_TOKENS].view(kv_heads, full, BLOCK_TOKENS, dim).permute(1, 2, 0, 3)
    selectors = {name: make_selector(name, dim, BLOCK_TOKENS, scale) for name in SELECTORS}
    summaries = {name: each.summarise(blocks) for name, each in selectors.items()}
    found = []
    for position in range(tokens - steps, tokens, stride):
        n = position // BLOCK_TOKENS
        grouped = query[:, position].view(kv_heads, -1, dim)
        weights = (grouped @ key[:, : position + 1].transpose(1, 2) * scale).softmax(dim=-1)
        masses = weights[..., : n * BLOCK_TOKENS].unflatten(-1, (n, BLOCK_TOKENS)).sum(-1).permute(2, 0, 1)
        rest = weights[..., n * BLOCK_TOKENS :].sum(-1)
        scores = {name: each.score(grouped, summaries[name][:n]) for name, each in selectors.items()}
        scores[ORACLE] = masses.sum(-1).log()
        scores[WINDOW] = torch.arange(n, dtype=torch.float32)[:, None].expand(n, kv_heads)
        found.append(
            [
                [[_share(masses, rest, each, budget) for budget in budgets] for each in (own, share(own))]
                for own in (scores[name] for name in NAMES)
            ]
        )
    return np.mean(found, axis=0)


def _share(masses: Tensor, rest: Tensor, scores: Tensor, budget: int) -> float:
    picked = select(scores, budget // BLOCK_TOKENS, FIRST, NEWEST)[..., None].expand(-1, *masses.shape[1:])
    return float((masses.gather(0, picked).sum(0) + rest).mean())


def attended(model_path: Any, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Queries [heads, tokens, dim] and keys [KV heads, tokens, dim] of each layer, after one dense pass."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        found[module.layer_idx] = query[0].clone(), key[0].clone()
        scaling = kwargs.get("scaling")
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)

    AttentionInterface.register("kvsieve_attended", attention)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvsieve_attended"
    ).model
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    return [found[layer] for layer in sorted(found)]
