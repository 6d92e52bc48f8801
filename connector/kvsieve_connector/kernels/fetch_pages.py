"""Pages of one layer from the host to a staging area on the GPU."""

from __future__ import annotations

import numpy as np
import torch

from .compile import launch, load
from .tables import require, require_device, require_tensor

__all__ = ["fetch_pages"]

THREADS, UNROLL = 1024, 4


def fetch_pages(staging: torch.Tensor, addresses: torch.Tensor, n_blocks: int) -> None:
    """Copy page_bytes bytes from host address addresses[i] to staging[i].

    staging: uint8 [P, page_bytes], page_bytes a multiple of 16. addresses: int64 [n], n <= P, on the device:
    page_addr + layer_offset; 16-byte aligned, mapped and pinned. n_blocks: thread blocks (multiprocessors) to
    use. One launch on the current stream, no host synchronisation.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    check_fetch(staging, addresses, n_blocks)
    require(staging.is_cuda, f"the kernel needs CUDA tensors, got {staging.device}")
    if addresses.shape[0] == 0:
        return
    size = staging.shape[1]
    function = load("fetch_pages", PAGE_BYTES=size, THREADS=THREADS, UNROLL=UNROLL)
    args = (staging, np.int64(size), addresses, np.int32(addresses.shape[0]))
    launch(function, (n_blocks,), THREADS, args)


def check_fetch(staging: torch.Tensor, addresses: torch.Tensor, n_blocks: int) -> None:
    """Raise ValueError where the arguments of fetch_pages do not fit."""
    require_tensor("staging", staging, torch.uint8, (None, None))
    require_tensor("addresses", addresses, torch.int64, (None,))
    pages, size = staging.shape
    require(addresses.shape[0] <= pages, f"{addresses.shape[0]} pages, but the staging area holds {pages}")
    require(size > 0 and size % 16 == 0, f"a staging page must be a multiple of 16 bytes, got {size}")
    require(n_blocks >= 1, f"n_blocks must be >= 1, got {n_blocks}")
    require_device(staging.device, addresses=addresses)
