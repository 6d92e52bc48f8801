"""Engine: one UCX worker and the thread that it belongs to."""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.errors import LinkError, UnavailableError
from kvsieve_store.transport import wire
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.ucx import binding

_log = logging.getLogger(__name__)

T = TypeVar("T")

TLS = "^sm"
"""Transports of UCX: all that are there, but for its shared memory. A store of the same host is read by
mapping its arena."""

_SETTINGS: Mapping[str, str] = {
    # For peers in shared memory: a process that is gone is found out within about 3 s.
    "KEEPALIVE_INTERVAL": "1s",
}
TCP_SETTINGS: Mapping[str, str] = {
    # 8 KiB fragments, the default, make UCX slower than a plain socket.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    # A host that is gone, or a wire that is cut, is found out within about 3 s.
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "2",
}
_MM_SETTINGS: Mapping[str, str] = {
    # Without it, endpoints that report errors do not use shared memory.
    "MM_ERROR_HANDLING": "y",
}
_MM = {"posix", "sysv", "xpmem"}
_MM_ALIASES = {"sm", "shm", "mm"}


def settings_of(tls: str) -> dict[str, str]:
    """Settings of UCX for this context only: the process may have others, an inference engine's.

    tls: as UCX_TLS. Of a transport that it leaves out none is set: UCX would warn on stderr.
    """
    names = set(tls.removeprefix("^").split(","))
    if tls.startswith("^"):
        tcp, mm = "tcp" not in names, not (names & _MM_ALIASES or names >= _MM)
    else:
        tcp, mm = bool(names & {"all", "tcp"}), bool(names & ({"all"} | _MM_ALIASES | _MM))
    return {"TLS": tls, **_SETTINGS, **(TCP_SETTINGS if tcp else {}), **(_MM_SETTINGS if mm else {})}


_EVENTS = 64
_CANCELED = -16
_ADDRESS_BYTES = wire.MAX_ADDRESS_BYTES
_DESCRIPTION_BYTES = 16 << 10
_TICK_SECONDS = 1.0

LET_GO_SECONDS = 5.0
"""For UCX to end an endpoint, and what is under way on it. Over shared memory it may never do so when the
peer has died (seen with 1.13.1). Then the worker is taken down with all of it: no memory stays in doubt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended. status: of UCX, 0 for success. refused: status of the reply; then text says
    why."""

    status: int
    refused: int
    text: bytes


@dataclass(eq=False, slots=True)
class Endpoint:
    """A way to one peer's worker. on_failed: called in the engine's thread, once; disconnect() it then.

    closed: set once UCX has let go of it; everything that was under way on it is over by then. ends_by: when
    it has to, time.monotonic() seconds.
    """

    handle: int
    on_failed: Callable[[], None]
    closed: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    ends_by: float = math.inf


Ask = Callable[[bytes, bytes], None]
"""Takes a request: header and body."""


class Engine:
    """Everything happens in its thread; call() brings work there. Sleeps while there is none.

    on_request: gets requests of peers, in the engine's thread. on_tick: called there about once a second
    while operations are under way.
    """

    def __init__(self, tls: str = TLS, settings: Mapping[str, str] | None = None) -> None:
        """tls: transports that UCX may use, as UCX_TLS. settings: others of UCX, on top of settings_of().

        Raises UnavailableError.
        """
        self._lib = binding.load()
        self.on_request: Ask = lambda header, body: None
        self.on_tick: Callable[[], None] = lambda: None
        self._inbox: deque[Callable[[], None]] = deque()
        self._operations: dict[int, tuple[Callable[[Outcome], None], object]] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._registered: dict[Memory, list[int]] = {}
        self._closing = False
        self._opened: Future[None] = Future()
        self._settings = {**settings_of(tls), **(settings or {})}
        self._thread = threading.Thread(target=self._run, name="kvsieve-ucx", daemon=True)
        self._thread.start()
        self._opened.result()

    # From any thread

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the engine's thread. Raises UnavailableError once the engine is closed."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if self._closing:
            raise UnavailableError("ucx: the engine is closed")
        self._inbox.append(run)
        self._lib.kv_wake(self._kv)
        return future

    def close(self) -> None:
        """Ends all endpoints, then the worker. What is under way fails."""
        if not self._closing:
            self._closing = True
            self._inbox.append(self._disconnect_all)
            self._lib.kv_wake(self._kv)
        self._thread.join()

    @property
    def operations(self) -> int:
        """Under way."""
        return len(self._operations)

    @property
    def endpoints(self) -> int:
        """That UCX has not let go of."""
        return len(self._endpoints)

    def words(self, status: int) -> str:
        """UCX's words for a status."""
        return self._lib.status(status)

    # In the engine's thread

    def connect(self, address: bytes, on_failed: Callable[[], None]) -> Endpoint:
        """An endpoint to the worker with this address. Raises LinkError."""
        status = ctypes.c_int()
        handle = self._lib.kv_connect(self._kv, address, status)
        if not handle:
            raise LinkError(f"ucx: can't connect: {self._lib.status(status.value)}")
        endpoint = Endpoint(handle, on_failed)
        self._endpoints[handle] = endpoint
        return endpoint

    def disconnect(self, endpoint: Endpoint) -> None:
        """Ends an endpoint at once; endpoint.closed follows."""
        endpoint.failed = True
        if endpoint.handle in self._endpoints and endpoint.ends_by == math.inf:
            endpoint.ends_by = time.monotonic() + LET_GO_SECONDS
            self._lib.kv_disconnect(endpoint.handle)

    def describe(self, endpoint: Endpoint) -> str:
        """What UCX says of it."""
        out = ctypes.create_string_buffer(_DESCRIPTION_BYTES)
        if endpoint.failed or endpoint.closed.is_set():
            return ""
        size = self._lib.kv_describe(endpoint.handle, out, len(out))
        return out.raw[:size].decode(errors="replace")

    def address(self) -> bytes:
        """Of this worker."""
        out = ctypes.create_string_buffer(_ADDRESS_BYTES)
        size = self._lib.kv_address(self._kv, out, len(out))
        if not size:
            raise UnavailableError(f"ucx: the worker's address is longer than {_ADDRESS_BYTES} bytes")
        return out.raw[:size]

    def ask(
        self,
        endpoint: Endpoint,
        request: tuple[wire.Kind, int, bytes],
        addresses: U64Array,
        lengths: U64Array,
        done: Callable[[Outcome], None],
    ) -> None:
        """Sends a request (kind, link, body); the reply goes to the addresses. done: called once, when it is
        there, or never will be."""
        kind, link, body = request
        number = self._number(done, None)
        header = wire.Head(kind, wire.Status.OK, number, len(body)).pack() + link.to_bytes(8, "little")
        ep, at, n = self._usable(endpoint, number), _flat(addresses), _flat(lengths)
        status = self._lib.kv_ask(ep, number, header, body, len(body), len(at), at.ctypes.data, n.ctypes.data)
        self._check(number, status)

    def answer(
        self,
        endpoint: Endpoint,
        head: wire.Head,
        addresses: U64Array,
        lengths: U64Array,
        done: Callable[[Outcome], None],
        keep: object = None,
    ) -> None:
        """Sends a reply from the addresses. keep: what must live until it is done."""
        number = self._number(done, keep)
        ep, at, n = self._usable(endpoint, number), _flat(addresses), _flat(lengths)
        status = self._lib.kv_answer(
            ep, number, head.pack() + bytes(8), len(at), at.ctypes.data, n.ctypes.data
        )
        self._check(number, status)

    def get(
        self,
        endpoint: Endpoint,
        addresses: U64Array,
        lengths: U64Array,
        remote: U64Array,
        keys: U64Array,
        registered: U64Array,
        done: Callable[[Outcome], None],
    ) -> None:
        """Reads the peer's memory at `remote`, one-sided. keys, registered: handles, per range."""
        number = self._number(done, None)
        ep = self._usable(endpoint, number)
        arrays = [_flat(each) for each in (addresses, lengths, remote, keys, registered)]
        status = self._lib.kv_get(ep, number, len(addresses), *(each.ctypes.data for each in arrays))
        self._check(number, status)

    def handles(self, memory: Memory) -> list[int]:
        """Per buffer of the memory the handle of its registration with UCX, which lasts as long as the
        engine. Raises LinkError."""
        found = self._registered.setdefault(memory, [])
        for base, view in list(zip(memory.bases.tolist(), memory.views, strict=True))[len(found) :]:
            status = ctypes.c_int()
            handle = self._lib.kv_map(self._kv, base, len(view), status)
            if not handle:
                raise LinkError(f"ucx: can't register {len(view)} bytes: {self._lib.status(status.value)}")
            found.append(int(handle))
        return found

    def pack_key(self, handle: int) -> bytes:
        """The remote key of registered memory."""
        out = ctypes.create_string_buffer(_ADDRESS_BYTES)
        size = self._lib.kv_pack_key(self._kv, handle, out, len(out))
        if not size:
            raise LinkError("ucx: there is no remote key for this memory")
        return out.raw[:size]

    def unpack_key(self, endpoint: Endpoint, key: bytes) -> int:
        """Handle of a peer's remote key. Raises LinkError."""
        status = ctypes.c_int()
        handle = self._lib.kv_unpack_key(endpoint.handle, key, status)
        if not handle:
            raise LinkError(f"ucx: can't use the peer's key: {self._lib.status(status.value)}")
        return int(handle)

    def drop_key(self, handle: int) -> None:
        self._lib.kv_drop_key(handle)

    # Inside

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        events = (binding.Event * _EVENTS)()
        ticked = time.monotonic()
        while not (self._closing and not self._endpoints and not self._inbox):
            ends_by = min((each.ends_by for each in self._endpoints.values()), default=math.inf)
            if ends_by < time.monotonic():
                _log.error("ucx: it does not end an endpoint; it is taken down, and not used any more")
                self._closing = True
                break
            busy = bool(self._operations) or ends_by < math.inf
            count = self._lib.kv_run(self._kv, events, _EVENTS, int(_TICK_SECONDS * 1000) if busy else -1)
            for event in events[:count]:
                self._guard(self._handle, event)
            while self._inbox:
                self._guard(self._inbox.popleft())
            if busy and (now := time.monotonic()) - ticked >= _TICK_SECONDS:
                ticked = now
                self._guard(self.on_tick)
        self._end()

    def _end(self) -> None:
        """What is left when the worker is gone is over."""
        clean = not self._endpoints
        if clean:
            for handle in (each for handles in self._registered.values() for each in handles):
                self._lib.kv_unmap(self._kv, handle)
        self._lib.kv_close(self._kv, clean)
        for done, _ in list(self._operations.values()):
            self._guard(done, Outcome(_CANCELED, 0, b""))
        for endpoint in self._endpoints.values():
            endpoint.closed.set()
        self._operations.clear()
        self._endpoints.clear()
        while self._inbox:
            self._guard(self._inbox.popleft())

    def _open(self) -> None:
        names, values = ((ctypes.c_char_p * len(self._settings))() for _ in range(2))
        # Before 1.14 a setting of one transport is named without the transport.
        old = tuple(map(int, self._lib.version.split("."))) < (1, 14)
        for i, (name, value) in enumerate(self._settings.items()):
            name = name.removeprefix("TCP_") if old else name
            names[i], values[i] = name.encode(), value.encode()
        status = ctypes.c_int()
        most = max(wire.MAX_REQUEST_BYTES, wire.TOKEN_BYTES + _ADDRESS_BYTES)
        self._kv = self._lib.kv_open(names, values, len(self._settings), most, status)
        if not self._kv:
            raise UnavailableError(f"ucx: can't start: {self._lib.status(status.value)}")

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            _log.exception("ucx: an event was not handled")

    def _handle(self, event: binding.Event) -> None:
        if event.type == binding.EV_DONE:
            done, _ = self._operations.pop(event.id)
            text = ctypes.string_at(event.ptr, event.size) if event.refused else b""
            done(Outcome(event.status, event.refused, text))
        elif event.type == binding.EV_REQUEST:
            raw = ctypes.string_at(event.ptr, event.size)
            self.on_request(raw[: binding.HEADER_BYTES], raw[binding.HEADER_BYTES :])
        elif event.type == binding.EV_FAILED:
            endpoint = self._endpoints[event.id]
            if not endpoint.failed:
                endpoint.failed = True
                endpoint.on_failed()
        elif event.type == binding.EV_CLOSED:
            self._endpoints.pop(event.id).closed.set()

    def _number(self, done: Callable[[Outcome], None], keep: object) -> int:
        # Random: a peer that knows this worker can't answer in another's place.
        number = secrets.randbits(64)
        self._operations[number] = (done, keep)
        return number

    def _usable(self, endpoint: Endpoint, number: int) -> int:
        if endpoint.failed or endpoint.handle not in self._endpoints:
            del self._operations[number]
            raise LinkError("the link to the peer broke")
        return endpoint.handle

    def _check(self, number: int, status: int) -> None:
        if status != binding.OK:
            del self._operations[number]
            raise LinkError(f"ucx: {self._lib.status(status)}")

    def _disconnect_all(self) -> None:
        for endpoint in list(self._endpoints.values()):
            self.disconnect(endpoint)


def _flat(array: U64Array) -> NDArray[np.uint64]:
    return np.ascontiguousarray(array, np.uint64)
