"""The kernels of one device type behind one set of names: CUDA, or the torch reference on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Each is the function of the same name in kvsieve_connector.kernels, or its reference."""

    swap_in: Callable[..., None]
    prefetch: Callable[..., None]
    gather_context: Callable[..., None]
    fetch_pages: Callable[..., None]


def kernel_set(device: torch.device) -> KernelSet:
    """The kernels for tensors on `device`. Without CuPy, the first use on CUDA raises ImportError, with what
    to install."""
    if device.type == "cuda":
        from kvsieve_connector.kernels.fetch_pages import fetch_pages
        from kvsieve_connector.kernels.gather_context import gather_context
        from kvsieve_connector.kernels.swap_in import prefetch, swap_in

        return KernelSet(swap_in, prefetch, gather_context, fetch_pages)
    from kvsieve_connector.kernels import fetch_pages_reference, gather_context_reference, swap_in_reference

    return KernelSet(
        swap_in_reference.swap_in,
        swap_in_reference.prefetch,
        gather_context_reference.gather_context,
        fetch_pages_reference.fetch_pages,
    )
