"""What speaks the protocol badly, or not at all, costs a listener nothing; nor does it cost a link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.errors import InvalidRequestError, LinkError
from kvsieve_store.transport import tcp, wire
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.tcp import TcpLink, TcpListener
from kvsieve_store.transport.wire import Head, Kind, Request, Status
from tests.transport.conftest import private, soon

LOCAL = TcpAddress("127.0.0.1", 0)
DATA = np.arange(4096, dtype=np.uint64).view(np.uint8)


@pytest.fixture
def exports() -> Exports:
    return Exports(Memory([DATA.copy()]))


@pytest.fixture
def listener(exports: Exports) -> Iterator[TcpListener]:
    listener = TcpListener(exports, LOCAL, max_links=4, send_seconds=1.0)
    yield listener
    listener.close()
    assert listener.links == 0


def dial(listener: TcpListener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port), 20)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def answer(sock: socket.socket) -> bytes:
    """All that comes until the peer closes."""
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def good(token: bytes) -> bytes:
    body = Request(Kind.READ, token, np.array([[0, 0, 8]], np.uint64)).body()
    return Head(Kind.READ, Status.OK, 1, len(body)).pack() + body


def works(listener: TcpListener, exports: Exports) -> None:
    token = exports.open(np.array([8], np.uint64), 16)
    until(lambda: listener.links < 4)
    memory, buffer = private(16)
    with TcpLink(listener.address, memory, soon()) as link:
        link.read(token, np.array([[0, 0, 16]], np.uint64), np.array([0], np.uint64), soon())
    assert buffer.tobytes() == DATA[8:24].tobytes()
    exports.close(token)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    garbage=st.one_of(
        st.binary(min_size=24, max_size=200), st.binary(min_size=20, max_size=200).map(b"KVS\x01".__add__)
    )
)
def test_garbage_ends_its_connection_only(listener: TcpListener, exports: Exports, garbage: bytes) -> None:
    with dial(listener) as sock:
        try:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            said = answer(sock)
        except OSError:  # the listener was quicker
            said = b""
    assert not said or Head.of(said[: wire.HEAD_BYTES]).status is not Status.OK
    until(lambda: listener.links == 0)
    works(listener, exports)


@pytest.mark.parametrize("size", [0, 15, 17, wire.MAX_REQUEST_BYTES + 24, 2**63, 2**64 - 1])
def test_a_length_that_can_not_be(listener: TcpListener, exports: Exports, size: int) -> None:
    with dial(listener) as sock:
        sock.sendall(Head(Kind.READ, Status.OK, 1, size).pack())
        assert answer(sock) == b""
    works(listener, exports)


@pytest.mark.parametrize("cut", [1, 23, 24, 30, 63])
def test_a_request_that_breaks_off(listener: TcpListener, exports: Exports, cut: int) -> None:
    token = exports.open(np.array([0], np.uint64), 16)
    with dial(listener) as sock:
        sock.sendall(good(token)[:cut])
    until(lambda: listener.links == 0)
    works(listener, exports)


def test_a_request_that_does_not_end(
    listener: TcpListener, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "FRAME_SECONDS", 0.1)
    with dial(listener) as silent, dial(listener) as slow:
        slow.sendall(good(bytes(16))[:30])
        assert (answer(silent), answer(slow)) == (b"", b"")
    works(listener, exports)


def test_a_reader_that_takes_nothing_is_dropped(exports: Exports) -> None:
    block = 8 << 20
    big = Exports(Memory([np.zeros(block, np.uint8)]))
    listener = TcpListener(big, LOCAL, send_seconds=0.3)
    drained = threading.Event()
    try:
        token = big.open(np.array([0], np.uint64), block)
        with dial(listener) as sock:
            body = Request(Kind.READ, token, np.array([[0, 0, block]], np.uint64)).body()
            for _ in range(8):
                sock.sendall(Head(Kind.READ, Status.OK, 1, len(body)).pack() + body)
            until(lambda: listener.links == 1)
            big.close(token, drained.set)
            assert drained.wait(20)
    finally:
        listener.close()


def test_connections_are_limited(listener: TcpListener, exports: Exports) -> None:
    held = [dial(listener) for _ in range(4)]
    until(lambda: listener.links == 4)
    with dial(listener) as more:
        assert answer(more) == b""
    for sock in held:
        sock.close()
    works(listener, exports)


class TestHostileListener:
    """A link to what answers `reply` to the first request."""

    @pytest.fixture
    def serve(self) -> Iterator[Callable[[bytes], TcpAddress]]:
        socks: list[socket.socket] = []

        def start(reply: bytes) -> TcpAddress:
            server = socket.create_server(("127.0.0.1", 0))
            socks.append(server)

            def run() -> None:
                sock, _ = server.accept()
                with sock, contextlib.suppress(ConnectionResetError):
                    sock.recv(1 << 16)
                    sock.sendall(reply)
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(1)

            threading.Thread(target=run, daemon=True).start()
            return TcpAddress("127.0.0.1", server.getsockname()[1])

        yield start
        for sock in socks:
            sock.close()

    def read(self, address: TcpAddress) -> np.ndarray:
        memory, buffer = private(64)
        with TcpLink(address, memory, soon()) as link:
            link.read(bytes(16), np.array([[0, 0, 8]], np.uint64), np.array([16], np.uint64), soon())
        return buffer

    def test_a_good_reply(self, serve: Callable[[bytes], TcpAddress]) -> None:
        buffer = self.read(serve(Head(Kind.READ, Status.OK, 1, 8).pack() + b"12345678"))
        assert buffer.tobytes() == bytes(16) + b"12345678" + bytes(40)

    @pytest.mark.parametrize(
        "reply",
        [
            b"",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            Head(Kind.READ, Status.OK, 1, 8).pack() + b"1234567",
            Head(Kind.READ, Status.OK, 1, 9).pack() + b"123456789",
            Head(Kind.READ, Status.OK, 1, 2**64 - 1).pack() + b"12345678",
            Head(Kind.READ, Status.OK, 2, 8).pack() + b"12345678",
            Head(Kind.LOCATE, Status.OK, 1, 8).pack() + b"12345678",
            Head(Kind.READ, Status.INVALID, 1, 2**40).pack() + b"1" * 100,
            Head(Kind.READ, Status.INVALID, 1, 10).pack() + b"1",
        ],
    )
    def test_a_bad_reply_breaks_the_link(self, serve: Callable[[bytes], TcpAddress], reply: bytes) -> None:
        with pytest.raises(LinkError):
            self.read(serve(reply))

    def test_a_refusal_of_bytes_that_are_no_text(self, serve: Callable[[bytes], TcpAddress]) -> None:
        with pytest.raises(InvalidRequestError, match="peer says"):
            self.read(serve(Head(Kind.READ, Status.INVALID, 1, 2).pack() + b"\xff\xfe"))

    def test_locations_without_end(self, serve: Callable[[bytes], TcpAddress]) -> None:
        address = serve(Head(Kind.LOCATE, Status.OK, 1, 2**62).pack())
        with TcpLink(address, private(8)[0], soon()) as link, pytest.raises(LinkError):
            link.locate(bytes(16), np.ones((1, 3), np.uint64), soon())


@pytest.mark.parametrize("reply", [b"", Head(Kind.READ, Status.OK, 1, 8).pack() + b"1234567"])
def test_a_listener_that_falls_silent_is_given_up_long_before_the_deadline(
    reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "QUIET_SECONDS", 0.2)
    server = socket.create_server(("127.0.0.1", 0))
    with TcpLink(TcpAddress("127.0.0.1", server.getsockname()[1]), private(8)[0], soon()) as link:
        peer, _ = server.accept()
        peer.sendall(reply)
        with pytest.raises(LinkError, match="nothing for"):
            link.read(bytes(16), np.array([[0, 0, 8]], np.uint64), np.zeros(1, np.uint64), soon())
    peer.close()
    server.close()


def test_a_listener_that_sends_a_byte_now_and_then_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "QUIET_SECONDS", 1.0)
    server = socket.create_server(("127.0.0.1", 0))
    memory, buffer = private(8)
    with TcpLink(TcpAddress("127.0.0.1", server.getsockname()[1]), memory, soon()) as link:
        peer, _ = server.accept()

        def trickle() -> None:
            for byte in Head(Kind.READ, Status.OK, 1, 8).pack() + b"12345678":
                peer.sendall(bytes([byte]))
                time.sleep(0.05)

        sender = threading.Thread(target=trickle)
        sender.start()
        link.read(bytes(16), np.array([[0, 0, 8]], np.uint64), np.zeros(1, np.uint64), soon())
        sender.join()
    assert buffer.tobytes() == b"12345678"
    peer.close()
    server.close()


def test_nobody_listens(unused_port: int) -> None:
    with pytest.raises(LinkError, match="can't connect"):
        TcpLink(TcpAddress("127.0.0.1", unused_port), private(8)[0], soon())
