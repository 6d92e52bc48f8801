"""Keys are found in a block as vLLM's CPU attention wrote them."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvsieve_connector.dense.packing import key_order

SHAPES = [(32, 64), (128, 128), (32, 80), (64, 256)]


@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keys_come_back_in_order(dtype: torch.dtype, tokens: int, dim: int) -> None:
    isa, heads = _get_attn_isa(dtype, tokens, dim), 3
    keys, values = torch.randn(2, 5 * tokens, heads, dim).to(dtype)
    cache = torch.zeros((6, heads, 2 * tokens, dim), dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens, 6 * tokens)
    ops.cpu_attn_reshape_and_cache(
        keys, values, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    order = key_order(isa, dtype, tokens, dim)
    assert sorted(order.tolist()) == list(range(tokens * dim))
    halves = cache[1:].flatten(2)[:, :, : tokens * dim]
    read = halves.index_select(2, order).view(5, heads, tokens, dim).transpose(1, 2)
    assert torch.equal(read.reshape(keys.shape), keys)
