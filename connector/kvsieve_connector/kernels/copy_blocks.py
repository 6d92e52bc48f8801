"""Copies of many pieces between the GPU and the host, in one launch."""

from __future__ import annotations

import numpy as np
import torch

from .compile import launch, load
from .tables import require, require_device, require_tensor

__all__ = ["copy_pieces"]

THREADS, UNROLL, BLOCKS = 512, 4, 16


def copy_pieces(src: torch.Tensor, dst: torch.Tensor, bytes: torch.Tensor) -> None:
    """Copy bytes[i] bytes from address src[i] to address dst[i].

    src, dst, bytes: int64 [n], on the device. Addresses are of the GPU or of mapped, pinned host memory;
    addresses and sizes are multiples of 16, and a size is less than 32 GiB; no piece overlaps another's
    destination. One launch on the current stream, no host synchronisation.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_copy(src, dst, bytes)
    require(src.is_cuda, f"the kernel needs CUDA tensors, got {src.device}")
    if src.shape[0] == 0:
        return
    function = load("copy_blocks", THREADS=THREADS, UNROLL=UNROLL)
    launch(function, (BLOCKS,), THREADS, (src, dst, bytes, np.int32(src.shape[0])))


def check_copy(src: torch.Tensor, dst: torch.Tensor, bytes: torch.Tensor) -> None:
    """Raise ValueError where the arguments of copy_pieces do not fit."""
    require_tensor("src", src, torch.int64, (None,))
    require_tensor("dst", dst, torch.int64, (src.shape[0],))
    require_tensor("bytes", bytes, torch.int64, (src.shape[0],))
    require_device(src.device, dst=dst, bytes=bytes)
