"""What `fetch_pages` means, in torch on CPU; addresses are of this process's memory."""

from __future__ import annotations

import ctypes

import torch

from .fetch_pages import check_fetch

__all__ = ["fetch_pages"]


def fetch_pages(staging: torch.Tensor, addresses: torch.Tensor, n_blocks: int) -> None:
    """As fetch_pages.fetch_pages."""
    check_fetch(staging, addresses, n_blocks)
    for i, address in enumerate(addresses.tolist()):
        ctypes.memmove(staging[i].data_ptr(), address, staging.shape[1])
