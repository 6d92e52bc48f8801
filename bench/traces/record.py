"""Traces of a real model: the positions that SmolLM2-135M-Instruct attends to most, over real text.

SmolLM2 has no indexer. Its top-k is made of the attention probabilities summed over the heads, which is what
DSA's indexer is trained to predict (DeepSeek-V3.2: KL divergence from the heads' summed attention).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import no_arguments
from bench.traces.trace import Trace
from kvsieve_connector.demo.model import build_once, cache_dir, ensure_smollm2

RECIPE = 1
"""Goes up when what is recorded changes."""

TEXTS = ("docs", "source")
TOKENS = 6_144
STEPS = 385
K = 256
BLOCK_TOKENS = 64 * K // 2048


def traces() -> list[Trace]:
    """One per text; recorded when the cache doesn't have them yet (about a minute)."""
    folder = build_once(cache_dir() / f"traces-{RECIPE}", _record)
    found = []
    for text in TEXTS:
        with np.load(folder / f"{text}.npz") as file:
            topk = file["topk"]
            found.append(
                Trace(f"SmolLM2, {text}", topk, int(file["start"]), BLOCK_TOKENS, tuple(range(topk.shape[1])))
            )
    return found


def text(name: str) -> str:
    """The text of that name, one of TEXTS: Python's language reference, or the source of two modules."""
    if name == "docs":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in ("specialnames", "compound", "typesseq"))
    import argparse
    import dataclasses

    return inspect.getsource(argparse) + inspect.getsource(dataclasses)


def _record(folder: Path) -> None:
    """Teacher-forced: one forward over the text; the last STEPS tokens are the decode steps.

    In a causal model a token's attention is the same whether the tokens come one by one or together.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    topk: dict[int, np.ndarray[Any, Any]] = {}

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **kwargs: Any
    ) -> Any:
        """query: [1, heads, tokens, 64]; key: [1, KV heads, tokens, 64]."""
        tokens = query.shape[2]
        first = tokens - STEPS
        groups = query.shape[1] // key.shape[1]
        keys = key[0].repeat_interleave(groups, 0).transpose(1, 2)
        scores = (query[0, :, first:] @ keys).float() * (scaling or query.shape[-1] ** -0.5)
        future = torch.arange(tokens) > torch.arange(first, tokens)[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).sum(0)
        picked = weights.topk(K, dim=-1).indices.sort(-1).values
        topk[module.layer_idx] = picked.numpy().astype(np.uint16)
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)

    AttentionInterface.register("kvsieve_record", attention)
    path = ensure_smollm2(cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="kvsieve_record"
    ).model
    for name in TEXTS:
        ids = tokenizer(text(name), return_tensors="pt", truncation=True, max_length=TOKENS).input_ids
        if ids.shape[1] != TOKENS:
            raise RuntimeError(f"the text {name!r} has {ids.shape[1]} tokens, needs {TOKENS}")
        with torch.inference_mode():
            model(ids, use_cache=False)
        stacked = np.stack([topk[layer] for layer in sorted(topk)], axis=1)
        np.savez_compressed(folder / f"{name}.npz", topk=stacked, start=TOKENS - STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.traces.record", __doc__, arguments)
    for trace in traces():
        steps, layers = trace.step_overlap(), trace.layer_overlap()
        print(
            f"{trace.name}: {trace.steps} steps, {trace.layers} layers, k {trace.k} of {trace.tokens}; "
            f"overlap of steps {steps.mean():.2f} ({steps.min():.2f} to {steps.max():.2f}), "
            f"of layers {layers.mean():.2f} ({layers.min():.2f} to {layers.max():.2f})"
        )


if __name__ == "__main__":
    main()
