"""Pages of one layer from the host to a staging area on the GPU."""

from __future__ import annotations

import numpy as np
import torch

from .compile import launch, load
from .tables import require, require_device, require_tensor

__all__ = ["fetch_pages"]

THREADS, UNROLL = 1024, 4


def fetch_pages(
    staging: torch.Tensor, addresses: torch.Tensor, n_blocks: int, *, page_bytes: int | None = None
) -> None:
    """Copy page_bytes bytes from host address addresses[i] to staging[i].

    staging: uint8 [P, bytes]. addresses: int64 [n], n <= P, on the device: page_addr + layer_offset; 16-byte
    aligned, mapped and pinned. n_blocks: thread blocks (multiprocessors) to use. page_bytes: by default the
    whole staging page. One launch on the current stream, no host synchronisation.
    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    size = check_fetch(staging, addresses, n_blocks, page_bytes)
    require(staging.is_cuda, f"the kernel needs CUDA tensors, got {staging.device}")
    if addresses.shape[0] == 0:
        return
    function = load("fetch_pages", PAGE_BYTES=size, THREADS=THREADS, UNROLL=UNROLL)
    args = (staging, np.int64(staging.shape[1]), addresses, np.int32(addresses.shape[0]))
    launch(function, (n_blocks,), THREADS, args)


def check_fetch(staging: torch.Tensor, addresses: torch.Tensor, n_blocks: int, page_bytes: int | None) -> int:
    """Raise ValueError where the arguments of fetch_pages do not fit; returns the bytes of a page."""
    require_tensor("staging", staging, torch.uint8, (None, None))
    require_tensor("addresses", addresses, torch.int64, (None,))
    pages, room = staging.shape
    size = room if page_bytes is None else page_bytes
    require(addresses.shape[0] <= pages, f"{addresses.shape[0]} pages, but the staging area holds {pages}")
    require(
        0 < size <= room and size % 16 == 0 and room % 16 == 0,
        f"page_bytes must be 16..{room}, a multiple of 16 as staging's {room} bytes a page; got {size}",
    )
    require(n_blocks >= 1, f"n_blocks must be >= 1, got {n_blocks}")
    require_device(staging.device, addresses=addresses)
    return size
