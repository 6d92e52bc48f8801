"""Makes the small models that the engine tests run.

    python deploy/cpu/make_models.py OUT [NAME ...]

prints the folder of each model, one a line. A model that is there already is not made again. The tiny ones
have random weights with a spread of 0.08: with the usual 0.02, wrong KV can pass unnoticed.

Run it as a process of its own, before vLLM is imported: vLLM re-registers some model types with transformers.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPE = 1
"""Goes up when a recipe below changes, so that cached models are made anew."""

SPREAD = 0.08
VOCAB = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": SPREAD,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def tiny_qwen3(out: Path) -> None:
    """GQA, 4 query and 2 KV heads of 64, 4 layers; bfloat16."""
    from transformers import Qwen3Config

    save(
        out,
        Qwen3Config(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=8192,
        ),
        "bfloat16",
    )


def tiny_gemma3(out: Path) -> None:
    """Hybrid: 6 layers, sliding windows of 128 tokens with full attention in layers 2 and 5; float32."""
    from transformers import Gemma3TextConfig

    save(
        out,
        Gemma3TextConfig(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=128,
            layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
            max_position_embeddings=8192,
        ),
        "float32",
    )


def tiny_dsv3(out: Path) -> None:
    """MLA with a latent of 512 + 64, 3 layers, the last two mixtures of 4 experts; float32.

    On CPU, vLLM needs compilation_config={"custom_ops": ["all", "-rotary_embedding"]} for it: its rotary
    embedding op is wrong for MLA's three-dimensional queries.
    """
    from transformers import DeepseekV3Config

    save(
        out,
        DeepseekV3Config(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=128,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            # transformers knows only these values; vLLM wants to read them.
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            moe_layer_freq=1,
            max_position_embeddings=4096,
        ),
        "float32",
    )


def smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct: real weights, dequantised to bfloat16."""
    from kvsieve_connector.demo.model import dequantise

    dequantise(out)


MODELS = {
    "tiny-qwen3": tiny_qwen3,
    "tiny-gemma3": tiny_gemma3,
    "tiny-dsv3": tiny_dsv3,
    "smollm2": smollm2,
}


def save(out: Path, config: Any, dtype: str) -> None:
    """Writes a model of that configuration with seeded random weights, and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    # Some classes set norms and biases to constants, or ignore the spread for parts of the model.
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0.0, SPREAD)
        elif "norm" not in name:
            weight.data.zero_()
    model.config.architectures = [type(model).__name__]
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    save_tokenizer(out)


def save_tokenizer(out: Path) -> None:
    """A byte-level BPE, trained on the standard library's sources: text that every machine has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_lines(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>"
    ).save_pretrained(out)


def library_lines() -> Iterator[str]:
    folder = Path(warnings.__file__).parent
    for path in sorted(folder.glob("*.py"))[:30]:
        yield from path.read_text(errors="ignore").splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the small models that the engine tests run.")
    parser.add_argument("out", type=Path, help="folder for the models")
    parser.add_argument("names", nargs="*", help=f"all when left out: {', '.join(MODELS)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")

    from kvsieve_connector.demo.model import build_once

    for name in args.names or MODELS:
        print(build_once(args.out / f"{name}-{RECIPE}", MODELS[name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
