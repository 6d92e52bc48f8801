"""Blocking sockets with deadlines: whole frames by one system call each, and one release of the GIL.

The kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO), over a whole call even when bytes trickle in. A socket
with a Python time-out would be a non-blocking one, with as many calls as its buffer has room for.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from kvsieve_store.errors import LinkError
from kvsieve_store.transport.base import seconds_left
from kvsieve_store.transport.memory import total

IOV_MAX = 1024

_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_NODELAY, socket.IPPROTO_TCP, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 2),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
    (socket.TCP_USER_TIMEOUT, socket.IPPROTO_TCP, 10_000),
)


def prepare(sock: socket.socket) -> None:
    """Options of every connection: a peer whose host is gone is found out within about 11 s."""
    for option, level, value in _KEEPALIVE:
        sock.setsockopt(level, option, value)
    sock.settimeout(None)


def _limit(sock: socket.socket, option: int, deadline: float) -> None:
    micros = max(int(seconds_left(deadline) * 1e6), 1)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(micros, 1_000_000)))


def receive(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Fills all views, at most IOV_MAX, in order. Raises LinkError when the peer is gone or `deadline`
    passes."""
    left = list(views)
    missing = total(left)
    while missing:
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            got = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            continue  # seconds_left() raises
        except OSError as error:
            raise LinkError(f"the link to the peer broke: {error.strerror}") from None
        if not got:
            raise LinkError("the link to the peer broke: it closed the connection")
        missing -= got
        left = _after(left, got)


def send(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Sends all views, at most IOV_MAX, in order. Raises as receive()."""
    left = list(views)
    missing = total(left)
    while missing:
        _limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(left, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            continue
        except OSError as error:
            raise LinkError(f"the link to the peer broke: {error.strerror}") from None
        missing -= sent
        left = _after(left, sent)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after their first `done` bytes."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []
