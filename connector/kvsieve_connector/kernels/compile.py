"""Compile and launch the kernels of this folder: NVRTC by way of CuPy, at first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent


def _cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"the sparse mode's CUDA kernels need CuPy ({error}): pip install cupy-cuda13x"
        ) from error


@cache
def load(name: str, **constants: int) -> Any:
    """The kernel `name` of `name.cu`, compiled with `constants` as macros.

    Once per process and set of constants; CuPy keeps the binaries on disk.
    Raises ImportError without CuPy, and CuPy's CompileException with the compiler's text.
    """
    options = tuple(f"-D{key}={value}" for key, value in constants.items())
    module = _cupy().RawModule(code=(HERE / f"{name}.cu").read_text(), options=options)
    return module.get_function(name)


def launch(
    function: Any, grid: tuple[int, ...], threads: int, args: tuple[Any, ...], shared_bytes: int = 0
) -> None:
    """Put one launch on torch's current stream, also under CUDA graph capture.

    args: tensors (passed as their address, None as a null pointer) and NumPy scalars (passed as they are).
    shared_bytes: dynamic shared memory of a thread block, which the function has been allowed.
    """
    passed = tuple(arg if isinstance(arg, np.generic) else np.uint64(_address(arg)) for arg in args)
    with _cupy().cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        function(grid, (threads,), passed, shared_mem=shared_bytes)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
