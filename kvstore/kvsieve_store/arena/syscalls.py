"""The system calls that Python lacks. ctypes releases the GIL for as long as one runs."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: faults pages in for writing."""

_MPOL_BIND = 2
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long


def populate(address: int, length: int) -> bool:
    """Faults pages in, `length` bytes from `address`; False where the kernel has no such call.

    Raises OSError when there is no memory for them.
    """
    while _libc.madvise(address, length, MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))
    return True


def bind_to_node(address: int, length: int, node: int) -> None:
    """Lets pages of this mapping come from one NUMA node only. Raises OSError."""
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {platform.machine()}")
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // word_bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // word_bits] = 1 << (node % word_bits)
    # The kernel reads maxnode - 1 bits.
    failed = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(length),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(words * word_bits + 1),
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
