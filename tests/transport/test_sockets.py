"""Pieces through a socket: the same bytes in order, however the kernel cuts them."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from kvsieve_store.errors import LinkError
from kvsieve_store.transport import sockets
from tests.transport.conftest import soon


def pieces_of(buffer: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[n, 2] uint64: the buffer, cut."""
    starts = buffer.ctypes.data + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.stack([starts, lengths], axis=1).astype(np.uint64)


def cut(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """`count` lengths, each at least 1, `total` in all."""
    inner = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
    return np.diff(np.concatenate([[0], inner, [total]]))


@pytest.mark.parametrize("counts", [(1, 1), (1, 3000), (3000, 1), (2500, 1700)])
@pytest.mark.parametrize("total", [5_000, 10 << 20])
def test_all_pieces_arrive_in_order(
    counts: tuple[int, int], total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_SEND", sockets._SEND._replace(most=total // 3 + 1))
    rng = np.random.default_rng(sum(counts))
    here, there = rng.integers(0, 256, total, np.uint8), np.zeros(total, np.uint8)
    source, target = (pieces_of(b, cut(rng, total, n)) for b, n in zip((here, there), counts, strict=True))
    before = source.copy(), target.copy()
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with near, far:
        sender = threading.Thread(target=sockets.send, args=(near, source, soon()))
        sender.start()
        sockets.receive(far, target, soon(), 20.0)
        sender.join()
    assert (here == there).all()
    assert (source == before[0]).all()
    assert (target == before[1]).all()


def test_what_is_not_taken_by_the_deadline_is_an_error() -> None:
    near, far = socket.socketpair()
    buffer = np.zeros(8 << 20, np.uint8)
    with near, far, pytest.raises(LinkError, match="deadline"):
        sockets.send(near, pieces_of(buffer, np.array([8 << 20])), time.monotonic() + 0.2)


def test_nothing_is_nothing() -> None:
    near, far = socket.socketpair()
    with near, far:
        sockets.send(near, sockets.piece(b""), soon())
        sockets.receive(far, sockets.piece(bytearray()), soon())
