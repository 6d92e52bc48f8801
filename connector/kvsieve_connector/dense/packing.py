"""How vLLM's CPU attention packs the keys of a block, found out by trying.

The cache of a layer is [num_blocks, heads, block_tokens, 2 * dim], but inside a block and head the first half
holds the keys in an order of the instruction set (transposed, or in tiles), the second the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 256
"""bfloat16 holds integers up to this exactly."""


def key_order(isa: str, dtype: torch.dtype, block_tokens: int, dim: int) -> Tensor:
    """Where a block's keys are: int64 [block_tokens * dim], token-major, positions in the first half of a
    head's part of the block. isa: of vLLM's CPU attention.

    Raises ValueError when the keys of a head are not there, each once.
    """
    size = block_tokens * dim
    ids = torch.arange(size)
    found = torch.zeros((2, size), dtype=torch.int64)
    place = 1
    while place < size:
        digit = (ids // place % DIGITS).to(dtype).view(block_tokens, dim)
        written = _written(isa, torch.stack([digit, digit.flip(0)], dim=1))
        found += written.double().round().to(torch.int64) * place
        place *= DIGITS
    order = found[0].argsort()
    there = torch.equal(found[0][order], ids)
    if not there or not torch.equal(found[1][order].view(block_tokens, dim).flip(0).flatten(), ids):
        raise ValueError(
            f"kvsieve: vLLM's CPU attention packs keys for {isa!r}, {dtype}, blocks of {block_tokens} and "
            f"heads of {dim} in a way that sparse mode can't read; try --dtype float32"
        )
    return order


def _written(isa: str, keys: Tensor) -> Tensor:
    """The first half of each head's part of a block, [heads, block_tokens * dim], that holds these keys,
    [block_tokens, heads, dim]."""
    from vllm import _custom_ops as ops

    tokens, heads, dim = keys.shape
    cache = torch.zeros((2, heads, 2 * tokens, dim), dtype=keys.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens)
    ops.cpu_attn_reshape_and_cache(
        keys.contiguous(),
        torch.zeros_like(keys),
        key_cache,
        value_cache,
        slots,
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache[1].flatten(1)[:, : tokens * dim]
