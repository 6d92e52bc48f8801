"""Summaries of blocks' keys, of all layers in one launch, from the pool or from the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .block_tables import DTYPES, SELECTORS, vectors_of
from .compile import launch, load
from .tables import require, require_device, require_tensor

__all__ = ["KeySources", "prepare", "summarise"]

THREADS = 128


@dataclass(frozen=True, eq=False)
class KeySources:
    """Where the keys of all layers are.

    caches: of the layers, [num_blocks, H, N, 2 * D], of one shape, strides and dtype. pool: int64 [L], the
    addresses of their first blocks; offsets: int64 [L], their bytes from a slot's base in the arena; both on
    the caches' device. Raises ValueError where one does not fit the others.
    """

    caches: tuple[torch.Tensor, ...]
    pool: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        like = self.caches[0]
        require(
            all(
                (c.shape, c.stride(), c.dtype) == (like.shape, like.stride(), like.dtype) for c in self.caches
            ),
            "the layers' caches differ in shape, strides or dtype",
        )
        require(like.dtype in DTYPES, f"keys must be bfloat16 or float16, got {like.dtype}")
        require_tensor("pool", self.pool, torch.int64, (len(self.caches),))
        require_tensor("offsets", self.offsets, torch.int64, (len(self.caches),))
        require_device(like.device, pool=self.pool, offsets=self.offsets)


def summarise(
    sources: KeySources, selector: str, source: torch.Tensor, page: torch.Tensor, summaries: torch.Tensor
) -> None:
    """Write the summaries of blocks, as the selector makes them, rounded to the caches' dtype.

    source: int64 [n], the address of a block's slot in the mapped, pinned arena, or -1 - its id in the pool.
    page: int32 [n], where its summary goes. summaries: [L, H, P, width]. One launch, no host synchronisation.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_summarise(sources, selector, source, page, summaries)
    like = sources.caches[0]
    require(like.is_cuda, f"the kernel needs CUDA tensors, got {like.device}")
    count = source.shape[0]
    if count == 0:
        return
    function = prepare(like, selector)
    stride = np.int64(like.stride(0) * like.element_size())
    pages = np.int32(summaries.shape[2])
    args = (source, page, sources.pool, stride, sources.offsets, summaries, pages)
    launch(function, (count, len(sources.caches), like.shape[1]), THREADS, args)


def prepare(like: torch.Tensor, selector: str) -> Any:
    """The kernel for caches like this one, compiled."""
    _, _, tokens, columns = like.shape
    return load(
        "summarise",
        DIM=columns // 2,
        BLOCK_TOKENS=tokens,
        PIECE_BYTES=tokens * columns * like.element_size(),
        THREADS=THREADS,
        SELECTOR=SELECTORS[selector],
        VECTORS=vectors_of(selector, tokens),
        FP16=DTYPES[like.dtype],
    )


def check_summarise(
    sources: KeySources, selector: str, source: torch.Tensor, page: torch.Tensor, summaries: torch.Tensor
) -> None:
    """Raise ValueError where the arguments of summarise do not fit."""
    like = sources.caches[0]
    require(selector in SELECTORS, f"no selector {selector!r}")
    layers, (_, heads, tokens, columns) = len(sources.caches), like.shape
    require(
        columns % 16 == 0 and tokens * columns <= 40 * 1024,
        f"blocks of {tokens} tokens with {columns // 2} channels do not fit the kernel's memory; choose "
        "smaller blocks (--block-size)",
    )
    require_tensor("source", source, torch.int64, (None,))
    require_tensor("page", page, torch.int32, (source.shape[0],))
    vectors = vectors_of(selector, tokens)
    require(tokens % vectors == 0, f"blocks of {tokens} tokens do not divide into {vectors} parts")
    width = vectors * columns // 2
    require_tensor("summaries", summaries, like.dtype, (layers, heads, None, width))
    require_device(like.device, source=source, page=page, summaries=summaries)
