"""The reading side over UCX."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import numpy as np

from kvsieve_store.errors import KVSieveError, LinkError, UnavailableError
from kvsieve_store.transport import wire
from kvsieve_store.transport.base import Link, chunks, seconds_left
from kvsieve_store.transport.description import Ucx
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.ucx import lanes
from kvsieve_store.transport.ucx.engine import Engine, Outcome
from kvsieve_store.transport.wire import Kind, Request, Status

_CHUNK_BYTES = 8 << 20
"""Of one message. UCX does not tell how much of it is there, so that a peer is heard of only so often."""

_WINDOW = 4

QUIET_SECONDS = 5.0
"""A peer that completes no message for so long is given up: with 8 MiB each, one at 1.6 MB/s is not."""

_NO_RANGES = np.zeros((0, 3), np.uint64)


class UcxLink(Link):
    """An endpoint to a UcxListener.

    way: "one-sided", or "messages"; see lanes.py.
    """

    transport = "ucx"

    def __init__(self, engine: Engine, peer: Ucx, token: bytes, memory: Memory, deadline: float) -> None:
        """Connects, and finds out by which wire. token: of any export of the peer's.

        Raises LinkError, UnavailableError.
        """
        super().__init__(memory)
        self._engine = engine
        self._peer = peer
        self._reading = threading.Lock()
        self._closed = False
        self._number = 0
        self._keys: list[int] = []
        self._registered: list[int] = []
        self._remote = _Remote(peer)
        self._endpoint = engine.call(lambda: engine.connect(peer.worker, self._on_failed)).result()
        try:
            self._number = self._hello(token, deadline)
            self.way = self._engine.call(self._choose).result()
        except BaseException:
            self.close()
            raise

    def read(self, token: bytes, ranges: U64Array, into: U64Array, deadline: float) -> None:
        one_sided = self.way == "one-sided"
        work = chunks(self.memory, ranges, into, wire.MAX_READ_BYTES if one_sided else _CHUNK_BYTES)
        if not self._reading.acquire(timeout=seconds_left(deadline)):
            raise LinkError("another read kept the link busy until the deadline")
        try:
            if self._closed:
                raise LinkError("the link is closed")
            if one_sided:
                for part, places in work:
                    self._get(token, part, places, deadline)
                confirm = Request(Kind.CONFIRM, token, _NO_RANGES).body()
                nothing = np.zeros(0, np.uint64)
                self._finish([self._submit(Kind.CONFIRM, confirm, nothing, nothing)], deadline)
                return
            pending: deque[Future[None]] = deque()
            try:
                for part, places in work:
                    if len(pending) == _WINDOW:
                        self._finish([pending.popleft()], deadline)
                    body = Request(Kind.READ, token, part).body()
                    lengths = np.ascontiguousarray(part[:, 2])
                    pending.append(
                        self._submit(Kind.READ, body, self.memory.addresses(places, lengths), lengths)
                    )
            finally:
                self._finish(pending, deadline)
        finally:
            self._reading.release()

    def close(self) -> None:
        self._closed = True
        try:
            self._engine.call(lambda: self._engine.disconnect(self._endpoint)).result()
        except UnavailableError:
            return  # the engine was closed, and with it all of its endpoints
        self._endpoint.closed.wait()
        with self._reading:
            self._engine.call(self._forget).result()

    def _hello(self, token: bytes, deadline: float) -> int:
        answer = np.zeros(1, np.uint64)
        body = token + self._engine.call(self._engine.address).result()
        hello = self._submit(Kind.HELLO, body, _addresses(answer), np.array([8], np.uint64))
        self._finish([hello], deadline)
        return int(answer[0])

    def _get(self, token: bytes, ranges: U64Array, into: U64Array, deadline: float) -> None:
        """One request of where the ranges are, then all of them at once."""
        offsets = np.zeros(len(ranges), np.uint64)
        body = Request(Kind.LOCATE, token, ranges).body()
        size = np.array([offsets.nbytes], np.uint64)
        self._finish([self._submit(Kind.LOCATE, body, _addresses(offsets), size)], deadline)
        lengths = np.ascontiguousarray(ranges[:, 2])
        segment, remote = self._remote.locate(offsets, lengths)
        buffer, at, _ = self.memory.locate(into, lengths)
        future: Future[None] = Future()
        self._engine.call(
            partial(
                self._start,
                future,
                partial(
                    self._engine.get,
                    self._endpoint,
                    self.memory.bases[buffer] + at,
                    lengths,
                    remote,
                    np.array(self._keys, np.uint64)[segment],
                    np.array(self._registered, np.uint64)[buffer],
                ),
            )
        )
        self._finish([future], deadline)

    def _submit(self, kind: Kind, body: bytes, addresses: U64Array, lengths: U64Array) -> Future[None]:
        future: Future[None] = Future()
        ask = partial(self._engine.ask, self._endpoint, (kind, self._number, body), addresses, lengths)
        self._engine.call(partial(self._start, future, ask))
        return future

    def _start(self, future: Future[None], operation: partial[None]) -> None:
        """In the engine's thread."""

        def done(outcome: Outcome) -> None:
            if outcome.refused:
                future.set_exception(_refusal(outcome))
            elif outcome.status:
                future.set_exception(
                    LinkError(f"the link to the peer broke: {self._engine.words(outcome.status)}")
                )
            else:
                future.set_result(None)

        try:
            operation(done=done)
        except KVSieveError as error:
            future.set_exception(error)

    def _finish(self, pending: deque[Future[None]] | list[Future[None]], deadline: float) -> None:
        """Waits for all; raises the first error. At the deadline, or when the peer is silent, the link is
        ended, and what is under way with it: only then UCX has let go of the memory."""
        error: BaseException | None = None
        for future in pending:
            left = deadline - time.monotonic()
            try:
                failure = future.exception(max(min(left, QUIET_SECONDS), 0))
            except FutureTimeoutError:
                self._closed = True
                self._engine.call(lambda: self._engine.disconnect(self._endpoint)).result()
                future.exception()
                failure = LinkError(
                    "the peer did not answer before the deadline"
                    if left <= QUIET_SECONDS
                    else f"the peer has completed nothing for {QUIET_SECONDS:g} s"
                )
            error = error or failure
        if isinstance(error, LinkError):
            self._closed = True
        if error is not None:
            raise error

    def _on_failed(self) -> None:
        self._closed = True
        self._engine.disconnect(self._endpoint)

    def _choose(self) -> lanes.Way:
        """In the engine's thread."""
        way = lanes.choose(self._engine.describe(self._endpoint))
        if way == "messages" or not self._peer.keys:
            return "messages"
        self._keys = [self._engine.unpack_key(self._endpoint, key) for key in self._peer.keys]
        self._registered = self._engine.handles(self.memory)
        return way

    def _forget(self) -> None:
        """In the engine's thread, once the endpoint is closed."""
        while self._keys:
            self._engine.drop_key(self._keys.pop())


class _Remote:
    """The peer's registered memory: what its offsets are as addresses there."""

    def __init__(self, peer: Ucx) -> None:
        self._bases = np.array(peer.bases, np.uint64)
        self._ends = np.cumsum(np.array(peer.sizes, np.uint64))
        self._starts = self._ends - np.array(peer.sizes, np.uint64)

    def locate(self, offsets: U64Array, lengths: U64Array) -> tuple[U64Array, U64Array]:
        """Segment and address of each range. Raises LinkError for what the peer has not registered."""
        segment = np.searchsorted(self._ends, offsets, side="right")
        inside = np.minimum(segment, len(self._ends) - 1)
        if (
            (segment >= len(self._ends))
            | (lengths > self._ends[inside] - np.minimum(offsets, self._ends[inside]))
        ).any():
            raise LinkError("the peer says of blocks that they are outside its memory")
        return inside, self._bases[inside] + offsets - self._starts[inside]


def _addresses(array: U64Array) -> U64Array:
    return np.array([array.ctypes.data], np.uint64)


def _refusal(outcome: Outcome) -> KVSieveError:
    try:
        return wire.refused(Status(outcome.refused), outcome.text)
    except ValueError:
        return LinkError(f"the peer answers with status {outcome.refused}, which is unknown")
