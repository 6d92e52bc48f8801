"""What every part that works beside the model on a device needs: small tables there, and work on a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """values, an array or nested lists of int, as a tensor on `device`, in the order of the current stream.

    The host does not wait for it; the pinned memory lives until the copy is done (torch's host allocator).
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside runs on `stream`, after all that is queued on the current one. None, for a CPU:
    at once."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
