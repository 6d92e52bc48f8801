"""What `copy_pieces` means; all addresses are of this process's memory."""

from __future__ import annotations

import ctypes

import torch

from .copy_blocks import check_copy

__all__ = ["copy_pieces"]


def copy_pieces(src: torch.Tensor, dst: torch.Tensor, bytes: torch.Tensor) -> None:
    """As copy_blocks.copy_pieces."""
    check_copy(src, dst, bytes)
    for source, target, size in zip(src.tolist(), dst.tolist(), bytes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
