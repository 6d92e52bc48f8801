"""Blocking sockets with deadlines: whole frames by few system calls, and one release of the GIL each.

The kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO), over a whole call even when bytes trickle in. A socket
with a Python time-out would be a non-blocking one, with as many calls as its buffer has room for. Ranges go
to the kernel as the numbers they are: a memoryview each, a thousand a request, costs more than the call, and
keeps Python's garbage collector busy.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvsieve_store.errors import LinkError
from kvsieve_store.transport.base import seconds_left
from kvsieve_store.transport.memory import U64Array

IOV_MAX = 1024

_SEND_BYTES = 4 << 20
"""Of one call that sends. One of 8 MiB or more takes a fifth longer per byte (Linux 6.18, loopback): the
kernel works off what has arrived meanwhile, acknowledgements above all, between calls."""

_SLICES = 5
"""A call that is to notice silence comes back so often, with what it has by then."""

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A host that is gone is found out within 5 s, and a peer that takes nothing that is sent to it, too.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5_000),
)


class _Message(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def prepare(sock: socket.socket) -> None:
    """Options of every connection."""
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    sock.settimeout(None)


def piece(buffer: bytes | bytearray) -> U64Array:
    """Pieces: a buffer, which has to stay; none when it is empty."""
    if not buffer:
        return np.zeros((0, 2), np.uint64)
    return np.array([[np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)]], np.uint64)


class _Way(NamedTuple):
    """A system call, the option that is its time-out, and the most bytes of one."""

    call: Callable[..., int]
    timeout: int
    most: int


_RECEIVE = _Way(_libc.recvmsg, socket.SO_RCVTIMEO, 1 << 30)
_SEND = _Way(_libc.sendmsg, socket.SO_SNDTIMEO, _SEND_BYTES)


def receive(sock: socket.socket, pieces: U64Array, deadline: float, quiet: float = math.inf) -> None:
    """Fills all pieces, in order.

    pieces: [n, 2] uint64, as of Memory.pieces(). quiet: seconds without a byte after which the peer is given
    up. Raises LinkError when the peer is gone or silent, or `deadline` passes.
    """
    _move(_RECEIVE, sock, pieces, socket.MSG_WAITALL, deadline, quiet)


def send(sock: socket.socket, pieces: U64Array, deadline: float, *, more: bool = False) -> None:
    """Sends all pieces, in order. more: what follows at once may go with it. Raises as receive()."""
    flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
    _move(_SEND, sock, pieces, flags, deadline, math.inf)


def _move(
    way: _Way, sock: socket.socket, pieces: U64Array, flags: int, deadline: float, quiet: float
) -> None:
    left = np.array(pieces, np.uint64)  # its rows become what is left of each
    ends, base = np.cumsum(left[:, 1]), left.ctypes.data
    total = int(ends[-1]) if len(ends) else 0
    done, row, message = 0, 0, _Message()
    moved = time.monotonic()
    while done < total:
        _limit(sock, way.timeout, min(seconds_left(deadline), quiet / _SLICES))
        stop = min(done + way.most, total)
        last = min(int(ends.searchsorted(np.uint64(stop))), row + IOV_MAX - 1)
        over = np.uint64(max(int(ends[last]) - stop, 0))
        left[last, 1] -= over
        message.pieces, message.count = base + row * left.strides[0], last + 1 - row
        got = way.call(sock.fileno(), message, flags)
        left[last, 1] += over
        if got > 0:
            moved = time.monotonic()
            done += got
            row = int(ends.searchsorted(np.uint64(done), side="right"))
            if done < total:
                rest = ends[row] - np.uint64(done)
                left[row, 0] += left[row, 1] - rest
                left[row, 1] = rest
        elif not got:
            raise LinkError("the link to the peer broke: it closed the connection")
        elif (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            raise LinkError(f"the link to the peer broke: {os.strerror(code)}")
        elif time.monotonic() - moved > quiet * (1 - 1 / _SLICES):
            raise LinkError(f"the peer has sent nothing for {quiet:g} s")


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    """Of the next call."""
    micros = max(int(seconds * 1e6), 1)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(micros, 1_000_000)))
