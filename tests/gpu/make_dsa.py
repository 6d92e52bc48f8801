"""Writes a DeepSeek-V3.2 in small: its attention shapes (latent 512 + 64, indexer 128), few layers.

    python tests/gpu/make_dsa.py OUT [--layers 4] [--hidden 1024] [--heads 64] [--drafter] [--no-weights]

Weights are random with a fixed seed, large enough that outputs depend on the prompt. Without them, vLLM makes
some with load_format="dummy"; outputs do not depend on the prompt then.

With a drafter, one MTP layer follows the model's, under the names of DeepSeek's checkpoints. Both then lean
towards one given token after each, and attention decides: the drafts are right about half of the time.
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
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 512, 512, 128, 64, 128
INDEX_HEADS, INDEX_DIM = 64, 128

FOLLOW = 0.0072
"""Of a token's embedding in the head's row of another token, which then follows it in most positions."""
DRAFTER_HIDDEN, DRAFTER_ATTENTION = 0.25, 4.0
"""Weight of the model's hidden state beside the embedding, and of attention beside what a layer has."""


@dataclass(frozen=True)
class Shape:
    """What is not DeepSeek's. heads: of the main attention. drafter: whether an MTP layer follows."""

    layers: int = 4
    hidden: int = 1024
    heads: int = 64
    drafter: bool = False


def config(shape: Shape) -> dict[str, Any]:
    """Every layer is dense: experts are declared, because the config class wants them, and never built."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "vocab_size": VOCAB,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 2048,
        "max_position_embeddings": 163_840,
        "rope_theta": 10_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": int(shape.drafter),
        "first_k_dense_replace": shape.layers + shape.drafter,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
    }


def weights(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    hidden, heads = shape.hidden, shape.heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    def ones(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    def block() -> dict[str, torch.Tensor]:
        return {
            "input_layernorm.weight": ones(hidden),
            "post_attention_layernorm.weight": ones(hidden),
            "self_attn.q_a_proj.weight": normal(Q_RANK, hidden),
            "self_attn.q_a_layernorm.weight": ones(Q_RANK),
            "self_attn.q_b_proj.weight": normal(heads * (NOPE + ROPE), Q_RANK, scale=0.06),
            "self_attn.kv_a_proj_with_mqa.weight": normal(KV_RANK + ROPE, hidden),
            "self_attn.kv_a_layernorm.weight": ones(KV_RANK),
            "self_attn.kv_b_proj.weight": normal(heads * (NOPE + VALUE), KV_RANK, scale=0.06),
            "self_attn.o_proj.weight": normal(hidden, heads * VALUE),
            "self_attn.indexer.wq_b.weight": normal(INDEX_HEADS * INDEX_DIM, Q_RANK),
            "self_attn.indexer.wk.weight": normal(INDEX_DIM, hidden),
            "self_attn.indexer.k_norm.weight": ones(INDEX_DIM, torch.float32),
            "self_attn.indexer.k_norm.bias": torch.zeros(INDEX_DIM),
            "self_attn.indexer.weights_proj.weight": normal(INDEX_HEADS, hidden),
            "mlp.gate_proj.weight": normal(2 * hidden, hidden),
            "mlp.up_proj.weight": normal(2 * hidden, hidden),
            "mlp.down_proj.weight": normal(hidden, 2 * hidden),
        }

    embedding, head = normal(VOCAB, hidden, scale=1.0), normal(VOCAB, hidden)
    tensors = {"model.norm.weight": ones(hidden)}
    for layer in range(shape.layers):
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block().items()}
    if shape.drafter:
        head[torch.randperm(VOCAB, generator=generator)] += FOLLOW * embedding
        inputs = torch.cat((torch.eye(hidden), DRAFTER_HIDDEN * torch.eye(hidden)), 1)
        parts = block() | {
            "enorm.weight": ones(hidden),
            "hnorm.weight": ones(hidden),
            "eh_proj.weight": inputs.to(torch.bfloat16),
            "embed_tokens.weight": embedding.clone(),
            "shared_head.norm.weight": ones(hidden),
            "shared_head.head.weight": head.clone(),
        }
        parts["self_attn.o_proj.weight"] *= DRAFTER_ATTENTION
        tensors |= {f"model.layers.{shape.layers}.{name}": tensor for name, tensor in parts.items()}
    return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--heads", type=int, default=Shape.heads)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--no-weights", action="store_true")
    args = parser.parse_args()
    shape = Shape(args.layers, args.hidden, args.heads, args.drafter)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.no_weights:
        save_file(weights(shape), args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    (args.out / "config.json").write_text(json.dumps(config(shape), indent=1))


if __name__ == "__main__":
    main()
