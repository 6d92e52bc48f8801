"""The kernels of one device type behind one set of names: CUDA, or the torch reference on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """Each is the function of the same name in kvsieve_connector.kernels, or its reference."""

    pick_blocks: Callable[..., None]
    summarise: Callable[..., None]
    fetch_pages: Callable[..., None]


def block_kernels(device: torch.device) -> BlockKernels:
    """The kernels for tensors on `device`. Without CuPy, the first use on CUDA raises ImportError, with what
    to install."""
    if device.type == "cuda":
        from kvsieve_connector.kernels.fetch_pages import fetch_pages
        from kvsieve_connector.kernels.pick_blocks import pick_blocks
        from kvsieve_connector.kernels.summarise import summarise

        return BlockKernels(pick_blocks, summarise, fetch_pages)
    from kvsieve_connector.dense.gpu import pick_blocks_reference, summarise_reference
    from kvsieve_connector.kernels import fetch_pages_reference

    return BlockKernels(
        pick_blocks_reference.pick_blocks, summarise_reference.summarise, fetch_pages_reference.fetch_pages
    )
