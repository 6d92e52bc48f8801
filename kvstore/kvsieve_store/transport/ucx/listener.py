"""The serving side over UCX."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field

import numpy as np

from kvsieve_store.errors import CapacityError, InvalidRequestError, KVSieveError, LinkError
from kvsieve_store.transport import wire
from kvsieve_store.transport.description import Ucx
from kvsieve_store.transport.exports import Export, Exports
from kvsieve_store.transport.ucx.engine import Endpoint, Engine, Outcome
from kvsieve_store.transport.wire import Head, Kind, Request, Status

_log = logging.getLogger(__name__)

MAX_LINKS = 256
MAX_ANSWERS = 8
"""Of one link, on their way."""

SEND_SECONDS = 30.0
IDLE_SECONDS = 300.0

_NOTHING = np.zeros(0, np.uint64)


@dataclass(eq=False, slots=True)
class _PeerLink:
    """answers: when each that is on its way was begun, by a number. seen: the last request."""

    endpoint: Endpoint
    seen: float
    answers: dict[int, float] = field(default_factory=dict)


class UcxListener:
    """Answers reads of exports that come over an engine, until close().

    one_sided: register the memory, so that peers may read it without asking where the wire allows it.
    """

    def __init__(
        self, engine: Engine, exports: Exports, *, one_sided: bool = True, send_seconds: float = SEND_SECONDS
    ) -> None:
        self._engine = engine
        self._exports = exports
        self._send_seconds = send_seconds
        self._links: dict[int, _PeerLink] = {}
        self._count = 0
        self.description = engine.call(lambda: self._start(one_sided)).result()

    @property
    def links(self) -> int:
        """Connections now."""
        return len(self._links)

    def close(self) -> None:
        """Ends the connections; returns once UCX touches the memory no more."""
        for endpoint in self._engine.call(self._stop).result():
            endpoint.closed.wait()

    # In the engine's thread

    def _start(self, one_sided: bool) -> Ucx:
        memory = self._exports.memory
        sizes = [len(view) for view in memory.views]
        handles = self._engine.handles(memory) if one_sided else []
        keys = [self._engine.pack_key(handle) for handle in handles]
        self._engine.on_request = self._on_request
        self._engine.on_tick = self._on_tick
        return Ucx.of(self._engine.address(), keys, memory.bases.tolist(), sizes)

    def _stop(self) -> list[Endpoint]:
        self._engine.on_request = lambda header, body: None
        endpoints = [link.endpoint for link in self._links.values()]
        for number in list(self._links):
            self._drop(number)
        return endpoints

    def _on_request(self, header: bytes, body: bytes) -> None:
        try:
            head = Head.of(header[: wire.HEAD_BYTES])
            if head.kind is Kind.HELLO:
                self._welcome(head, body)
            else:
                self._answer(int.from_bytes(header[wire.HEAD_BYTES :], "little"), head, body)
        except KVSieveError as error:
            _log.debug("ucx: a request was dropped: %s", error)

    def _welcome(self, head: Head, body: bytes) -> None:
        token, address = body[: wire.TOKEN_BYTES], body[wire.TOKEN_BYTES :]
        if not 0 < len(address) <= wire.MAX_ADDRESS_BYTES:
            raise InvalidRequestError(f"address: {len(address)} bytes given")
        # Addresses are taken from those only who may read something.
        with self._exports.reading(token):
            pass
        if len(self._links) >= MAX_LINKS:
            raise CapacityError(f"links: there are {MAX_LINKS}, the most")
        number = secrets.randbits(63) + 1
        endpoint = self._engine.connect(address, lambda: self._drop(number))
        link = self._links[number] = _PeerLink(endpoint, time.monotonic())
        self._send(link, head, number.to_bytes(8, "little"))

    def _answer(self, number: int, head: Head, body: bytes) -> None:
        link = self._links.get(number)
        if link is None:
            raise InvalidRequestError("link: no such link")
        link.seen = time.monotonic()
        export: Export | None = None
        try:
            if len(link.answers) >= MAX_ANSWERS:
                raise CapacityError(f"requests: {MAX_ANSWERS} are not answered yet, the most of one link")
            request = Request.of(head, body)
            export = self._exports.begin(request.token)
            text, offsets, lengths = export.answer(request)
            addresses = self._exports.memory.addresses(offsets, lengths) if len(offsets) else None
        except KVSieveError as error:
            if export is not None:
                self._exports.end(export)
            self._send(link, *wire.refusal(head, error))
            return
        if addresses is None:
            self._exports.end(export)
            self._send(link, head, text)
            return
        reply = Head(head.kind, Status.OK, head.id, int(lengths.sum()))
        begun = self._begin(link)

        def done(outcome: Outcome) -> None:
            link.answers.pop(begun, None)
            self._exports.end(export)

        try:
            self._engine.answer(link.endpoint, reply, addresses, lengths, done)
        except LinkError:
            done(Outcome(-1, 0, b""))
            raise

    def _send(self, link: _PeerLink, head: Head, text: bytes) -> None:
        """A short reply, in bytes of its own."""
        reply = Head(head.kind, head.status, head.id, len(text))
        kept = np.frombuffer(text, np.uint8).copy()
        begun = self._begin(link)
        pieces = (
            (np.array([kept.ctypes.data], np.uint64), np.array([len(text)], np.uint64))
            if text
            else (_NOTHING, _NOTHING)
        )

        def done(outcome: Outcome) -> None:
            link.answers.pop(begun, None)

        try:
            self._engine.answer(link.endpoint, reply, *pieces, done, kept)
        except LinkError:
            link.answers.pop(begun, None)
            raise

    def _begin(self, link: _PeerLink) -> int:
        self._count += 1
        link.answers[self._count] = time.monotonic()
        return self._count

    def _drop(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            self._engine.disconnect(link.endpoint)

    def _on_tick(self) -> None:
        """Drops peers that do not take what they asked for, or that ask for nothing any more."""
        now = time.monotonic()
        for number, link in list(self._links.items()):
            stuck = any(now - begun > self._send_seconds for begun in link.answers.values())
            if stuck or (not link.answers and now - link.seen > IDLE_SECONDS):
                _log.info("ucx: a peer was dropped: it %s", "takes no bytes" if stuck else "is idle")
                self._drop(number)
