"""Moves a process into a network namespace, as `ip netns exec` does."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC_SLAVE = 0x4000 | 0x80000
_MNT_DETACH = 2


def enter(path: str) -> None:
    """This process, and those that it starts. /sys then names the namespace's devices: UCX looks there. path:
    of the namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if libc[name](*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name}, to enter {path}")

    call("setns", os.open(path, os.O_RDONLY), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC_SLAVE), None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)
