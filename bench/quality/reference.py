"""SmolLM2-135M in transformers, with the attention of sparse mode: what the engine is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvsieve_connector.dense.selectors import make_selector, select, share

BLOCK_TOKENS = 32
"""The least on CPUs. On GPUs blocks have 16 by default."""
FIRST = 1
NEWEST = 2
AT_ONCE = 512
"""Tokens."""


@dataclass(frozen=True)
class Picks:
    """What decode steps attend to: budget_tokens in picked blocks, the first block, the NEWEST full ones and
    the one that is being filled. shared: one list for all KV heads. dense_layers: first layers that see all.
    block_tokens: of a block.
    """

    selector: str
    budget_tokens: int
    shared: bool = False
    dense_layers: int = 0
    block_tokens: int = BLOCK_TOKENS

    @property
    def full_blocks(self) -> int:
        """Attended to at most, in a layer that is not dense; beside them the one that is being filled."""
        return FIRST + self.budget_tokens // self.block_tokens + NEWEST


class Reference:
    """Prompts are read exactly. Tokens after them are decoded with given picks, all in one pass: each token
    picks by its own query among blocks that were full before it, so that it sees what it would see alone.
    """

    def __init__(self, model: Any) -> None:
        """model: a causal language model of transformers with _attention, as load() makes it."""
        self._model = model
        config = model.config
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def prefill(self, ids: list[int], cache: DynamicCache | None = None) -> DynamicCache:
        """The cache of these tokens, exactly; goes on where `cache` ends."""
        cache = cache or DynamicCache()
        self._forward(ids, cache, None, 1)
        return cache

    def decode(self, cache: DynamicCache, ids: list[int], picks: Picks | None) -> Tensor:
        """Logits after each of these tokens, [len(ids), vocabulary] float32. picks None: dense. The cache is
        as before afterwards."""
        logits = self._forward(ids, cache, picks, 0)
        cache.crop(-len(ids))
        return logits

    def _forward(self, ids: list[int], cache: DynamicCache, picks: Picks | None, keep: int) -> Tensor:
        _picks.append(picks)
        try:
            with torch.inference_mode():
                found = self._model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=keep)
        finally:
            _picks.pop()
        return found.logits[0].float()


def load(path: Any, dtype: torch.dtype = torch.float32) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=_NAME))


_NAME = "kvsieve_block_topk"
_picks: list[Picks | None] = [None]
"""Of the forward under way."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> Any:
    """query: [1, heads, tokens, dim]; key, value: [1, KV heads, context, dim], these tokens' last."""
    picks = _picks[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if picks is not None and module.layer_idx >= picks.dense_layers:
        out = block_topk(query[0].float(), key[0].float(), value[0].float(), picks, scale)
        return out.to(query.dtype).transpose(0, 1)[None], None
    return _exact(module, query, key, value, scale), None


def _exact(module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, as _attention's. A few queries at a time when there are keys before them: else half
    of the work would be for what they don't see. Returns [1, tokens, heads, dim]."""
    tokens, context = query.shape[2], key.shape[2]
    if tokens == context:
        found = sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)
        return cast(Tensor, found[0])
    parts = []
    for start in range(0, tokens, AT_ONCE):
        some = query[:, :, start : start + AT_ONCE]
        end = context - tokens + start + some.shape[2]
        seen = torch.ones(some.shape[2], end, dtype=torch.bool).tril(end - some.shape[2])[None, None]
        found = sdpa_attention_forward(module, some, key[:, :, :end], value[:, :, :end], seen, scaling=scale)
        parts.append(found[0])
    return torch.cat(parts, dim=1)


def block_topk(query: Tensor, key: Tensor, value: Tensor, picks: Picks, scale: float) -> Tensor:
    """Attention of the last tokens of a context to what each of them picks.

    query: [heads, tokens, dim]; key, value: [KV heads, context, dim]; float32. Returns [heads, tokens, dim].
    """
    heads, tokens, dim = query.shape
    kv_heads, context, _ = key.shape
    size = picks.block_tokens
    out = []
    for position, end, picked in picked_blocks(query, key, picks, scale):
        full = picked.shape[-1] * size
        first = position - context + tokens
        grouped = query.view(kv_heads, -1, tokens, dim)[:, :, first : first + end - position]
        newer = torch.ones(end - position, end - full, dtype=torch.bool)
        newer = newer.tril(position - full).expand(len(picked), -1, -1)
        seen = torch.cat([picked.repeat_interleave(size, dim=-1), newer], dim=-1)[:, None]
        logits = (grouped * scale).flatten(1, 2) @ key[:, :end].transpose(1, 2)
        weights = logits.view(*grouped.shape[:3], end).masked_fill_(~seen, -torch.inf).softmax(dim=-1)
        out.append((weights.flatten(1, 2) @ value[:, :end]).view(heads, end - position, dim))
    return torch.cat(out, dim=1)


def picked_blocks(
    query: Tensor, key: Tensor, picks: Picks, scale: float
) -> Iterator[tuple[int, int, Tensor]]:
    """What the last tokens of a context pick, query and key as block_topk's. Yields, for tokens that pick
    among the same blocks, the first one's position, that after the last one's, and bool [lists, tokens,
    blocks]."""
    _, tokens, dim = query.shape
    kv_heads, context, _ = key.shape
    size = picks.block_tokens
    selector = make_selector(picks.selector, dim, size, scale)
    full = context // size
    blocks = key[:, : full * size].view(kv_heads, full, size, dim)
    summaries = selector.summarise(blocks.permute(1, 2, 0, 3))
    score = torch.func.vmap(selector.score, in_dims=(0, None))
    position = context - tokens
    while position < context:
        n = position // size
        end = min((n + 1) * size, context)
        some = query[:, position - context + tokens :][:, : end - position]
        scores = score(some.view(kv_heads, -1, end - position, dim).permute(2, 0, 1, 3), summaries[:n])
        if picks.shared:
            scores = share(scores)
        yield position, end, _seen(scores, picks)
        position = end


def _seen(scores: Tensor, picks: Picks) -> Tensor:
    """scores: [tokens, blocks, lists]. Returns [lists, tokens, blocks] bool: what each token picks."""
    tokens, n, lists = scores.shape
    columns = scores.transpose(0, 1).reshape(n, tokens * lists)
    picked = select(columns, picks.budget_tokens // picks.block_tokens, FIRST, NEWEST)
    seen = torch.zeros(columns.shape, dtype=torch.bool).scatter_(0, picked, True)
    return seen.view(n, tokens, lists).permute(2, 1, 0)


AttentionInterface.register(_NAME, _attention)
