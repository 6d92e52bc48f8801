"""Writes a Llama in small or in full: grouped-query attention of common shapes, random weights, a fixed seed.

    python tests/gpu/make_dense.py OUT [--layers 4] [--hidden 1024] [--inner 2048] [--steady 0] [--no-weights]

32 query heads share 8 KV heads of 128 channels. Weights are large enough that outputs depend on the prompt.
--steady: how much of a query is a bias, and so the same in every step: the more, the more a step's blocks are
those of the step before. Without weights, vLLM makes some with load_format="dummy"; outputs do not depend on
the prompt then.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 32_000
HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    hidden: int = 1024
    inner: int = 2048
    steady: float = 0.0


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "vocab_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 163_840,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def weights(shape: Shape, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    hidden = shape.hidden
    generator = torch.Generator(device).manual_seed(seed)
    unit = hidden**-0.5
    """With it, a projection of a normed state has channels of variance one."""

    def normal(*size: int, scale: float) -> torch.Tensor:
        made = torch.randn(*size, generator=generator, device=device) * scale
        return made.to(torch.bfloat16).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def block() -> dict[str, torch.Tensor]:
        query, share = HEADS * DIM, shape.steady
        return {
            "input_layernorm.weight": ones(hidden),
            "post_attention_layernorm.weight": ones(hidden),
            "self_attn.q_proj.weight": normal(query, hidden, scale=1.5 * unit * (1 - share**2) ** 0.5),
            "self_attn.q_proj.bias": normal(query, scale=1.5 * share),
            "self_attn.k_proj.weight": normal(KV_HEADS * DIM, hidden, scale=1.5 * unit),
            "self_attn.k_proj.bias": normal(KV_HEADS * DIM, scale=0.0),
            "self_attn.v_proj.weight": normal(KV_HEADS * DIM, hidden, scale=unit),
            "self_attn.v_proj.bias": normal(KV_HEADS * DIM, scale=0.0),
            "self_attn.o_proj.weight": normal(hidden, query, scale=query**-0.5),
            "self_attn.o_proj.bias": normal(hidden, scale=0.0),
            "mlp.gate_proj.weight": normal(shape.inner, hidden, scale=unit),
            "mlp.up_proj.weight": normal(shape.inner, hidden, scale=unit),
            "mlp.down_proj.weight": normal(hidden, shape.inner, scale=shape.inner**-0.5),
        }

    tensors = {
        "model.norm.weight": ones(hidden),
        "model.embed_tokens.weight": normal(VOCAB, hidden, scale=1.0),
        "lm_head.weight": normal(VOCAB, hidden, scale=2 * unit),
    }
    for layer in range(shape.layers):
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block().items()}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--inner", type=int, default=Shape.inner)
    parser.add_argument("--steady", type=float, default=Shape.steady, help="0 to 1")
    parser.add_argument("--no-weights", action="store_true")
    args = parser.parse_args()
    shape = Shape(args.layers, args.hidden, args.inner, args.steady)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.no_weights:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        save_file(weights(shape, device=device), args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    (args.out / "config.json").write_text(json.dumps(config(shape), indent=1))


if __name__ == "__main__":
    main()
