"""Requests over UCX that are wrong, from what is let in and from what is not."""

from __future__ import annotations

import base64
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import psutil
import pytest

from kvsieve_store.errors import LinkError
from kvsieve_store.transport import wire
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.ucx.engine import Endpoint, Engine, Outcome
from kvsieve_store.transport.wire import Kind, Request, Status
from tests.transport.conftest import LinkTo, StartPeer, needs_ucx, private, soon
from tests.transport.peer import BLOCK, Peer, pattern

SIZE = 4 << 20

pytestmark = needs_ucx

Engines = Callable[[str], Engine]

_READER = """
import base64, sys
import numpy as np
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.ucx.engine import Engine
from tests.transport.conftest import private, soon
from tests.transport.peer import LOOPBACK
size = int(sys.argv[3])
memory, _ = private(size)
token = base64.b64decode(sys.argv[2])
description = Description.of(base64.b64decode(sys.argv[1]))
link = connect(description, token, memory, soon(), engine=Engine("tcp", LOOPBACK), transports=["ucx"])
ranges = np.array([[block, 0, 65536] for block in range(size // 65536)], np.uint64)
while True:
    link.read(token, ranges, ranges[:, 0] * np.uint64(65536), soon())
    print("read", flush=True)
"""


def works(peer: Peer, link_to: LinkTo) -> None:
    memory, buffer = private(BLOCK)
    with link_to(peer, memory, "ucx-tcp") as link:
        link.read(peer.token, np.array([[2, 0, BLOCK]], np.uint64), np.zeros(1, np.uint64), soon())
    assert (buffer == pattern(SIZE)[2 * BLOCK : 3 * BLOCK]).all()


class Speaker:
    """Says to a peer what it is told to."""

    def __init__(self, engine: Engine, description: Description) -> None:
        assert description.ucx is not None
        worker = description.ucx.worker
        self.engine = engine
        self.endpoint: Endpoint = engine.call(lambda: engine.connect(worker, lambda: None)).result()
        self.answer = np.zeros(8192, np.uint8)

    def ask(self, kind: Kind, link: int, body: bytes, size: int) -> Future[Outcome]:
        """size: bytes of the answer that is expected."""
        future: Future[Outcome] = Future()
        at = np.array([self.answer.ctypes.data][: size > 0], np.uint64)
        lengths = np.array([size][: size > 0], np.uint64)
        ask = partial(self.engine.ask, self.endpoint, (kind, link, body), at, lengths, future.set_result)
        self.engine.call(ask).result()
        return future

    def hello(self, token: bytes) -> int:
        address = self.engine.call(self.engine.address).result()
        assert self.ask(Kind.HELLO, 0, token + address, 8).result(20).status == 0
        return int(self.answer[:8].view(np.uint64)[0])

    def close(self) -> None:
        self.engine.call(lambda: self.engine.disconnect(self.endpoint)).result()
        assert self.endpoint.closed.wait(20)


@pytest.mark.parametrize(
    "body",
    [
        bytes(16),
        b"",
        bytes(17),
        b"\xff" * 40,
        bytes(16) + b"\xff" * 8192,
        b"\xff" * 24_000,
    ],
)
def test_who_is_not_let_in_gets_no_answer(
    start_peer: StartPeer, engines: Engines, link_to: LinkTo, body: bytes
) -> None:
    peer = start_peer(SIZE, "ucx-tcp")
    speaker = Speaker(engines("tcp"), peer.description)
    asked = [speaker.ask(kind, link, body, 8) for kind in Kind for link in (0, 1, secrets.randbits(64))]
    works(peer, link_to)
    assert not any(future.done() for future in asked)
    speaker.close()
    assert all(future.result(20).status for future in asked)


def test_a_link_asks_nonsense(start_peer: StartPeer, engines: Engines, link_to: LinkTo) -> None:
    peer = start_peer(SIZE, "ucx-tcp")
    speaker = Speaker(engines("tcp"), peer.description)
    link = speaker.hello(peer.token)
    for ranges in ([[0, BLOCK, 1]], [[2**64 - 1, 0, 1]], [[0, 2**64 - 1, 2]], [[0, 0, 0]], []):
        body = Request(Kind.READ, peer.token, np.array(ranges, np.uint64).reshape(-1, 3)).body()
        outcome = speaker.ask(Kind.READ, link, body, 8).result(20)
        assert outcome.refused == Status.INVALID
        assert outcome.text.startswith(b"ranges")
    body = Request(Kind.READ, bytes(16), np.array([[0, 0, 8]], np.uint64)).body()
    assert speaker.ask(Kind.READ, link, body, 8).result(20).refused == Status.UNKNOWN_EXPORT
    assert speaker.ask(Kind.READ, link, body[:-1], 8).result(20).refused == Status.INVALID
    # An answer of another size than expected is not written.
    good = Request(Kind.READ, peer.token, np.array([[0, 0, 8]], np.uint64)).body()
    assert speaker.ask(Kind.READ, link, good, 7).result(20).status != 0
    assert speaker.ask(Kind.READ, link, good, 8).result(20).status == 0
    assert (speaker.answer[:8] == pattern(SIZE)[:8]).all()
    speaker.close()
    works(peer, link_to)


def test_garbage_on_the_port_of_the_worker(start_peer: StartPeer, link_to: LinkTo) -> None:
    peer = start_peer(SIZE, "ucx-tcp")
    listening = [
        each for each in psutil.Process(peer.process.pid).net_connections() if each.status == "LISTEN"
    ]
    mine = [each.laddr.port for each in listening if each.laddr.port != peer.description.address.port]
    assert mine
    for port in mine:
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(4096),
            b"\xff" * 4096,
            wire.MAX_READ_BYTES.to_bytes(8, "little"),
        ):
            with socket.create_connection(("127.0.0.1", port), 20) as sock:
                sock.sendall(garbage)
    works(peer, link_to)


def test_readers_are_killed_in_the_middle(start_peer: StartPeer, link_to: LinkTo) -> None:
    peer = start_peer(16 << 20, "ucx-tcp")
    arguments = [
        base64.b64encode(peer.description.pack()).decode(),
        base64.b64encode(peer.token).decode(),
        str(16 << 20),
    ]
    for turn in range(5):
        reader = subprocess.Popen([sys.executable, "-c", _READER, *arguments], stdout=subprocess.PIPE)
        assert reader.stdout is not None
        while reader.stdout.readline().strip() != b"read":
            assert reader.poll() is None
        time.sleep(0.002 * turn)
        reader.send_signal(signal.SIGKILL if turn % 2 else signal.SIGSTOP)
        if turn % 2:
            reader.wait()
        memory, buffer = private(BLOCK)
        with link_to(peer, memory, "ucx-tcp") as link:
            link.read(peer.token, np.array([[7, 0, BLOCK]], np.uint64), np.zeros(1, np.uint64), soon())
        assert buffer.any()
        if turn == 4:  # a reader that takes nothing keeps no blocks
            peer.say("close")
            assert peer.hear() == "drained"
        reader.kill()
        reader.wait()
        reader.stdout.close()
    assert peer.process.poll() is None


def test_an_engine_that_is_closed_ends_its_reads(
    start_peer: StartPeer, engines: Engines, link_to: LinkTo
) -> None:
    peer = start_peer(SIZE, "ucx-tcp")
    memory, _ = private(BLOCK)
    link = link_to(peer, memory, "ucx-tcp")
    peer.signal(signal.SIGSTOP)
    engine = engines("tcp")
    failed: Future[None] = Future()

    def read() -> None:
        try:
            link.read(peer.token, np.array([[0, 0, BLOCK]], np.uint64), np.zeros(1, np.uint64), soon())
        except BaseException as error:
            failed.set_exception(error)

    threading.Thread(target=read).start()
    while not engine.operations:
        time.sleep(0.01)
    engine.close()
    assert isinstance(failed.exception(20), LinkError)
