"""SmolLM2-135M in transformers, with the attention of sparse mode: what the engine is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvsieve_connector.dense.selectors import make_selector, select, share

BLOCK_TOKENS = 32
FIRST = 1
NEWEST = 2


@dataclass(frozen=True)
class Picks:
    """What decode steps attend to: budget_tokens in picked blocks, the first block, the NEWEST full ones and
    the one that is being filled. shared: one list for all KV heads. dense_layers: first layers that see all.
    """

    selector: str
    budget_tokens: int
    shared: bool = False
    dense_layers: int = 0

    @property
    def attended_tokens(self) -> int:
        """At most, in a layer that is not dense."""
        return self.budget_tokens + (FIRST + NEWEST + 1) * BLOCK_TOKENS


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
        before = cache.get_seq_length()
        logits = self._forward(ids, cache, picks, 0)
        cache.crop(before)
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
    tokens, context = query.shape[2], key.shape[2]
    seen = None
    if tokens != context:
        seen = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)[None, None]
    return sdpa_attention_forward(module, query, key, value, seen, scaling=scale, is_causal=tokens == context)


def block_topk(query: Tensor, key: Tensor, value: Tensor, picks: Picks, scale: float) -> Tensor:
    """Attention of the last tokens of a context to what each of them picks.

    query: [heads, tokens, dim]; key, value: [KV heads, context, dim]; float32. Returns [heads, tokens, dim].
    """
    heads, tokens, dim = query.shape
    kv_heads, context, _ = key.shape
    selector = make_selector(picks.selector, dim, scale)
    full = context // BLOCK_TOKENS
    blocks = key[:, : full * BLOCK_TOKENS].view(kv_heads, full, BLOCK_TOKENS, dim)
    summaries = selector.summarise(blocks.permute(1, 2, 0, 3))
    each_head = torch.arange(kv_heads)[:, None]
    out = torch.empty_like(query)
    for i in range(tokens):
        position = context - tokens + i
        n = position // BLOCK_TOKENS
        grouped = query[:, i].view(kv_heads, -1, dim)
        scores = selector.score(grouped, summaries[:n])
        if picks.shared:
            scores = share(scores)
        picked = select(scores, picks.budget_tokens // BLOCK_TOKENS, FIRST, NEWEST).expand(-1, kv_heads)
        inside = torch.arange(BLOCK_TOKENS)
        rows = (picked[:, None] * BLOCK_TOKENS + inside[None, :, None]).flatten(0, 1).T
        rest = torch.arange(n * BLOCK_TOKENS, position + 1).expand(kv_heads, -1)
        rows = torch.cat([rows, rest], dim=1)
        keys, values = key[each_head, rows], value[each_head, rows]
        weights = (grouped @ keys.transpose(1, 2) * scale).softmax(dim=-1)
        out[:, i] = (weights @ values).view(heads, dim)
    return out


AttentionInterface.register(_NAME, _attention)
