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
from kvsieve_store.transport.base import Link, chunks, seconds_left
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory, U64Array, total
from kvsieve_store.transport.wire import HEAD_BYTES, Head, Kind, Request, Status

_log = logging.getLogger(__name__)

_WINDOW = 2
"""Requests on their way at a time."""

MAX_LINKS = 256
FRAME_SECONDS = 5.0
"""From the first byte of a frame to its last, and until the first frame of a connection."""

IDLE_SECONDS = 300.0
SEND_SECONDS = 30.0
"""For one reply: a peer that does not take its bytes holds up nobody for longer."""

Chunks = Iterator[tuple[U64Array, U64Array]]

_NO_RANGES = np.zeros((0, 3), np.uint64)


class TcpListener:
    """Answers reads of exports on a TCP port, in threads of its own, until close().

    address: where it listens, the real port included.
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
        self.address = TcpAddress(address.host, self._socket.getsockname()[1])
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
        first = memoryview(raw)[:1]
        try:
            sockets.receive(sock, [first], time.monotonic() + idle)
        except LinkError:
            return False
        frame_ends = time.monotonic() + FRAME_SECONDS
        sockets.receive(sock, [memoryview(raw)[1:]], frame_ends)
        head = Head.of(raw)
        wire.check_request_size(head)
        body = bytearray(head.size)
        sockets.receive(sock, [memoryview(body)], frame_ends)
        try:
            request = Request.of(head, memoryview(body))
            with self._exports.reading(request.token) as export:
                text, offsets, lengths = export.answer(request)
                views = self._exports.memory.slices(offsets, lengths) if len(offsets) else [memoryview(text)]
                self._reply(sock, Head(head.kind, Status.OK, head.id, total(views)), views)
        except LinkError:
            raise
        except KVSieveError as error:
            reply, text = wire.refusal(head, error)
            self._reply(sock, reply, [memoryview(text)])
        return True

    def _reply(self, sock: socket.socket, head: Head, views: list[memoryview]) -> None:
        deadline = time.monotonic() + self._send_seconds
        sockets.send(sock, [memoryview(head.pack()), *views[: sockets.IOV_MAX - 1]], deadline)
        if views[sockets.IOV_MAX - 1 :]:
            sockets.send(sock, views[sockets.IOV_MAX - 1 :], deadline)


class TcpLink(Link):
    """A connection to a TcpListener."""

    transport = "tcp"

    def __init__(self, address: TcpAddress, memory: Memory, deadline: float) -> None:
        """Connects. Raises LinkError."""
        super().__init__(memory)
        self._reading = threading.Lock()
        self._closed = False
        self._last_id = 0
        try:
            self._socket = socket.create_connection((address.host, address.port), seconds_left(deadline))
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
            head = self._receive_head(self._request(kind, token, ranges, deadline), deadline)
            if head.size != size:
                raise LinkError(f"the peer answers with {head.size} bytes, {size} asked for")
            return self._receive_body(head, deadline)

    def _read(self, token: bytes, work: Chunks, deadline: float) -> None:
        pending: deque[tuple[Head, U64Array, U64Array]] = deque()
        refused: KVSieveError | None = None
        while True:
            while refused is None and len(pending) < _WINDOW and (chunk := next(work, None)) is not None:
                ranges, into = chunk
                pending.append((self._request(Kind.READ, token, ranges, deadline), into, ranges[:, 2]))
            if not pending:
                break
            sent, into, lengths = pending.popleft()
            try:
                head = self._receive_head(sent, deadline)
                views = self.memory.slices(into, lengths)
                if head.size != total(views):
                    raise LinkError(f"the peer answers with {head.size} bytes, {total(views)} asked for")
                sockets.receive(self._socket, views, deadline)
            except LinkError:
                raise
            except KVSieveError as error:
                refused = refused or error  # of what was asked, nothing is left on the wire
        if refused is not None:
            raise refused

    def _request(self, kind: Kind, token: bytes, ranges: U64Array, deadline: float) -> Head:
        body = Request(kind, token, ranges).body()
        self._last_id += 1
        head = Head(kind, Status.OK, self._last_id, len(body))
        sockets.send(self._socket, [memoryview(head.pack()), memoryview(body)], deadline)
        return head

    def _receive_head(self, sent: Head, deadline: float) -> Head:
        """The head of the reply to `sent`. Raises what a refusal stands for."""
        raw = bytearray(HEAD_BYTES)
        sockets.receive(self._socket, [memoryview(raw)], deadline)
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
        sockets.receive(self._socket, [memoryview(body)], deadline)
        return bytes(body)
