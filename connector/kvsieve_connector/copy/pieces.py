"""Copies many pieces at once between the paged cache and the arena: by DMA, or by a kernel.

A DMA engine starts each piece anew, which small ones feel; a kernel reads and writes host memory through its
mapping and takes processors from the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger

from kvsieve_connector.device import upload

logger = init_logger("vllm.kvsieve")

KERNEL_BYTES = 512 << 10
"""Pieces of at most so many bytes are copied by the kernel: pieces of 41 KiB go at 50 GB/s, by DMA at 13
(H200, PCIe 5 x16; bench/gpu/copies.py)."""

_KERNEL_ALIGN = 16


Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces in no order, int64 [n] each: addresses to read and to write, and bytes."""

    sources: Numbers
    targets: Numbers
    sizes: Numbers

    @property
    def copied(self) -> int:
        """Bytes of all."""
        return int(self.sizes.sum())

    def reversed(self) -> Pieces:
        """The same the other way round."""
        return Pieces(self.targets, self.sources, self.sizes)


Way = Callable[[Pieces, torch.device], None]
"""Launches the copies on the current stream of the device. Pieces are one or more."""


def way_of(largest: int, alignment: int) -> Way:
    """How to copy pieces of at most `largest` bytes; `alignment` divides their addresses and sizes."""
    if largest > KERNEL_BYTES or alignment % _KERNEL_ALIGN:
        return by_dma
    if find_spec("cupy") is None:
        logger.warning(
            "kvsieve: CuPy is not installed, so pieces of %d bytes are copied by DMA, which is slower: "
            "pip install cupy-cuda13x",
            largest,
        )
        return by_dma
    return by_kernel


def by_dma(pieces: Pieces, device: torch.device) -> None:
    """One call of the driver for all."""
    ops.swap_blocks_batch(
        torch.from_numpy(pieces.sources),
        torch.from_numpy(pieces.targets),
        torch.from_numpy(pieces.sizes),
    )


def by_kernel(pieces: Pieces, device: torch.device) -> None:
    """One launch for all."""
    from kvsieve_connector.kernels.copy_blocks import copy_pieces

    table = np.stack([pieces.sources, pieces.targets, pieces.sizes])
    copy_pieces(*upload(table, torch.int64, device))
