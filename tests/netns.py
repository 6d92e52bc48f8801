"""Moves a process into a network namespace."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNET = 0x40000000


def enter(path: str) -> None:
    """This process, and those that it starts. path: of the namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(path, os.O_RDONLY), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {path}")
