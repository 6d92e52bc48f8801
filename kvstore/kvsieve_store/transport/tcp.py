"""The transport over plain sockets: needs nothing, works everywhere.

Ranges go from the arena to the socket and from the socket to the arena by one vectored call a request; Python
touches no payload. A thread per connection, since a call that moves megabytes is better off blocking.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.errors import InvalidRequestError, KVSieveError, LinkError
from kvsieve_store.transport import sockets, wire
from kvsieve_store.transport.base import QUIET_SECONDS, Link, chunks, seconds_left
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.wire import HEAD_BYTES, Head, Kind, Request, Status

_log = logging.getLogger(__name__)

_AHEAD_BYTES = 32 << 10
"""Of requests that are on their way."""

MAX_LINKS = 256
FRAME_SECONDS = 5.0
"""From the head of a frame to its end, and until the first head of a connection."""

IDLE_SECONDS = 300.0
SEND_SECONDS = 30.0
"""For one reply: a peer that does not take its bytes holds up nobody for longer."""

Chunks = Iterator[tuple[U64Array, U64Array]]

_NO_RANGES = np.zeros((0, 3), np.uint64)


class TcpListener:
    """Answers reads of exports on a TCP port, in threads of its own, until close().

    address: where it listens: an IP address and the real port.
    """

    def __init__(
        self,
        exports: Exports,
        address: TcpAddress,
        *,
        max_links: int = MAX_LINKS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        """Raises OSError when it can't listen."""
        self._exports = exports
        self._max_links = max_links
        self._send_seconds = send_seconds
        self._lock = threading.Lock()
        self._links: dict[socket.socket, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server((address.host, address.port), family=family, backlog=128)
        host, port = self._socket.getsockname()[:2]
        # An IPv6 address as it was given: it may have a zone.
        self.address = TcpAddress(address.host if family is socket.AF_INET6 else host, port)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="kvsieve-tcp", daemon=True)
        self._thread.start()

    @property
    def links(self) -> int:
        """Connections now."""
        return len(self._links)

    def close(self) -> None:
        """Ends the connections; returns once no thread touches the memory any more."""
        with self._lock:
            self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()
        self._thread.join()
        with self._lock:
            links = dict(self._links)
        for sock, thread in links.items():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("can't accept connections of peers: %s", error.strerror)
                time.sleep(0.1)  # out of descriptors, say
                continue
            with self._lock:
                if self._closed or len(self._links) >= self._max_links:
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="kvsieve-tcp-link", daemon=True
                )
                self._links[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sockets.prepare(sock)
            idle = FRAME_SECONDS
            while self._answer(sock, idle):
                idle = IDLE_SECONDS
        except (KVSieveError, OSError) as error:
            _log.debug("a peer's connection ended: %s", error)
        except Exception:
            _log.exception("a peer's connection failed")
        finally:
            with self._lock:
                del self._links[sock]
            sock.close()

    def _answer(self, sock: socket.socket, idle: float) -> bool:
        """One request. False when the peer has closed, LinkError or InvalidRequestError when the connection
        is of no more use: what follows a broken frame has no meaning."""
        raw = bytearray(HEAD_BYTES)
        try:
            sockets.receive(sock, sockets.piece(raw), time.monotonic() + idle)
        except LinkError:
            return False
        head = Head.of(raw)
        wire.check_request_size(head)
        asked = bytearray(head.size)
        sockets.receive(sock, sockets.piece(asked), time.monotonic() + FRAME_SECONDS)
        try:
            request = Request.of(head, memoryview(asked))
            with self._exports.reading(request.token) as export:
                text, offsets, lengths = export.answer(request)
                memory = self._exports.memory
                body = memory.pieces(offsets, lengths) if len(offsets) else sockets.piece(text)
                self._reply(sock, head, Status.OK, body)
        except LinkError:
            raise
        except KVSieveError as error:
            reply, text = wire.refusal(head, error)
            self._reply(sock, head, reply.status, sockets.piece(text))
        return True

    def _reply(self, sock: socket.socket, head: Head, status: Status, body: U64Array) -> None:
        """body: pieces."""
        deadline = time.monotonic() + self._send_seconds
        size = int(body[:, 1].sum())
        raw = Head(head.kind, status, head.id, size).pack()
        sockets.send(sock, sockets.piece(raw), deadline, more=size > 0)
        sockets.send(sock, body, deadline)


class TcpLink(Link):
    """A connection to a TcpListener."""

    transport = "tcp"

    def __init__(self, address: TcpAddress, memory: Memory, deadline: float) -> None:
        """Connects. Raises LinkError. address: an IP address: to resolve a name may take any time."""
        super().__init__(memory)
        self._reading = threading.Lock()
        self._closed = False
        self._last_id = 0
        try:
            patience = min(seconds_left(deadline), QUIET_SECONDS)
            self._socket = socket.create_connection((address.host, address.port), patience)
        except OSError as error:
            raise LinkError(f"can't connect to the peer at {address.host_port}: {error}") from None
        sockets.prepare(self._socket)
        # A reset at the end: the peer drops at once what it still has for us.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def read(self, token: bytes, ranges: U64Array, into: U64Array, deadline: float) -> None:
        work = chunks(self.memory, ranges, into)
        with self._exclusive(deadline):
            self._read(token, work, deadline)

    def locate(self, token: bytes, ranges: U64Array, deadline: float) -> U64Array:
        """Where each range is in the peer's memory, [n] uint64, unchecked. At most MAX_RANGES. Raises as
        read()."""
        found = self._ask(Kind.LOCATE, token, ranges, 8 * len(ranges), deadline)
        return np.frombuffer(found, "<u8").astype(np.uint64, copy=False)

    def confirm(self, token: bytes, deadline: float) -> None:
        """Raises NotFoundError when the export is over: what was located may be something else now."""
        self._ask(Kind.CONFIRM, token, _NO_RANGES, 0, deadline)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._socket.close()

    @contextmanager
    def _exclusive(self, deadline: float) -> Iterator[None]:
        """One reader at a time; what breaks under it is closed."""
        if not self._reading.acquire(timeout=seconds_left(deadline)):
            raise LinkError("another read kept the link busy until the deadline")
        try:
            if self._closed:
                raise LinkError("the link is closed")
            yield
        except BaseException as error:
            if isinstance(error, LinkError) or not isinstance(error, KVSieveError):
                self._closed = True
                self._socket.close()
            raise
        finally:
            self._reading.release()

    def _ask(self, kind: Kind, token: bytes, ranges: U64Array, size: int, deadline: float) -> bytes:
        with self._exclusive(deadline):
            sent, frame = self._frame(kind, token, ranges)
            sockets.send(self._socket, sockets.piece(frame), deadline)
            head = self._receive_head(sent, deadline)
            if head.size != size:
                raise LinkError(f"the peer answers with {head.size} bytes, {size} asked for")
            return self._receive_body(head, deadline)

    def _read(self, token: bytes, work: Chunks, deadline: float) -> None:
        """Requests go ahead of the replies, as many as a socket's buffer surely has room for: the peer is
        never without one, and between two replies there is nothing to do here."""
        pending: deque[tuple[Head, int, U64Array]] = deque()
        ahead = 0
        refused: KVSieveError | None = None
        while True:
            while refused is None and ahead < _AHEAD_BYTES and (part := next(work, None)):
                ranges, into = part
                head, frame = self._frame(Kind.READ, token, ranges)
                sockets.send(self._socket, sockets.piece(frame), deadline)
                lengths = ranges[:, 2]
                pending.append((head, int(lengths.sum()), self.memory.pieces(into, lengths)))
                ahead += head.size
            if not pending:
                break
            sent, size, pieces = pending.popleft()
            ahead -= sent.size
            try:
                reply = self._receive_head(sent, deadline)
                if reply.size != size:
                    raise LinkError(f"the peer answers with {reply.size} bytes, {size} asked for")
                sockets.receive(self._socket, pieces, deadline, QUIET_SECONDS)
            except LinkError:
                raise
            except KVSieveError as error:
                refused = refused or error  # of this request, nothing is left on the wire
        if refused is not None:
            raise refused

    def _frame(self, kind: Kind, token: bytes, ranges: U64Array) -> tuple[Head, bytes]:
        """A request: its head, and all of it."""
        body = Request(kind, token, ranges).body()
        self._last_id += 1
        head = Head(kind, Status.OK, self._last_id, len(body))
        return head, head.pack() + body

    def _receive_head(self, sent: Head, deadline: float) -> Head:
        """The head of the reply to `sent`. Raises what a refusal stands for."""
        raw = bytearray(HEAD_BYTES)
        sockets.receive(self._socket, sockets.piece(raw), deadline, QUIET_SECONDS)
        try:
            head = Head.of(raw)
        except InvalidRequestError as error:
            raise LinkError(f"the peer does not speak this protocol: {error}") from None
        if (head.kind, head.id) != (sent.kind, sent.id):
            raise LinkError(
                f"the peer answers {head.kind.name} {head.id}, {sent.kind.name} {sent.id} was asked"
            )
        if head.status is not Status.OK:
            if head.size > wire.MAX_TEXT_BYTES:
                raise LinkError(f"the peer refuses with {head.size} bytes")
            raise wire.refused(head.status, self._receive_body(head, deadline))
        return head

    def _receive_body(self, head: Head, deadline: float) -> bytes:
        body = bytearray(head.size)
        sockets.receive(self._socket, sockets.piece(body), deadline, QUIET_SECONDS)
        return bytes(body)
