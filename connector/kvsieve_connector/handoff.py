"""Hand-offs between engines of two stores: a prompt that was computed on one host decodes on another.

On the wire between engines and their proxy are `kv_transfer_params` (docs/pd.md). The prefill side keeps what
it has sealed until the other store has pulled it (Departures); the decode side lets its store pull before it
asks for a match (Arrivals). Nothing here waits: both are polled once a step or more often. A hand-off that
fails costs the prompt's computation, never the request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvsieve_connector.stats import KVSieveStats
from kvsieve_store.client import Attachment, Pulled, StoreClient
from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.limits import MAX_BATCH

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvsieve_connector.settings import ConnectorSettings

logger = init_logger("vllm.kvsieve")

MAX_PULLS = 64
"""Under way at a time; more wait for their turn."""

OPTIONAL_SECONDS = 5.0
"""For a pull of what is no loss."""

RETRY_SECONDS = 0.1
"""Until a pull is tried again that the store had no room for."""


def is_departure(request: Request) -> bool:
    """Whether another engine goes on with the request once its prompt is computed."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's prompt is, or is being computed.

    store: control address of the store, which finds the pool, or says what differs. wait_ms: as
    `kvsieve_wait_ms`; None when it was not given.
    """

    store: str
    wait_ms: int | None = None

    @staticmethod
    def of(request: Request) -> Source | None:
        """None for a request without a hand-off, and for one whose fields are of no use, which is logged."""
        given = request.kv_transfer_params or {}
        store = given.get("kvsieve_store")
        if not given.get("do_remote_prefill") or store is None:
            return None
        wait_ms = given.get("kvsieve_wait_ms")
        is_number = isinstance(wait_ms, int) and not isinstance(wait_ms, bool) and wait_ms >= 0
        if not (isinstance(store, str) and (wait_ms is None or is_number)):
            logger.warning(
                "kvsieve: request %s: kv_transfer_params: kvsieve_store must be a text and kvsieve_wait_ms a "
                "number of milliseconds; the prompt is computed here",
                request.request_id,
            )
            return None
        return Source(store, wait_ms)


@dataclass(frozen=True, slots=True)
class Part:
    """Keys that are pulled in one call. parent: key of the block before. optional: not waited for, and no
    loss."""

    keys: Sequence[bytes]
    parent: bytes
    optional: bool = False


def parts_of(keys: Sequence[bytes]) -> list[Part]:
    """A chain from its start, cut into calls."""
    return [
        Part(keys[at : at + MAX_BATCH], keys[at - 1] if at else b"") for at in range(0, len(keys), MAX_BATCH)
    ]


@dataclass(eq=False, slots=True)
class _Arrival:
    source: Source
    parts: deque[Part]
    slot_bytes: int
    started: float
    not_before: float = 0.0
    pull: Future[Pulled] | None = None


class Arrivals:
    """Pulls of requests that other engines have computed, or compute now. Times are on a monotonic clock."""

    def __init__(
        self,
        settings: ConnectorSettings,
        stats: KVSieveStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._stats, self._clock = settings, stats, clock
        self._arrivals: dict[str, _Arrival] = {}
        self._running = 0
        """Pulls under way."""

    def __len__(self) -> int:
        """Requests that wait for their blocks."""
        return len(self._arrivals)

    def begin(
        self, req_id: str, source: Source, parts: Sequence[Part], attachment: Attachment | None
    ) -> None:
        """The request's blocks are to be had at the source. Does nothing when this store can't take them."""
        self._stats.add(handoffs_in=1)
        if attachment is None:
            self._failed(req_id, source, "this engine has no store")
        elif parts:
            self._arrivals[req_id] = _Arrival(source, deque(parts), attachment.slot_bytes, self._clock())

    def is_over(self, req_id: str, client: StoreClient | None) -> bool:
        """Whether the request can go on: all that comes is here, or it never had a hand-off."""
        arrival = self._arrivals.get(req_id)
        if arrival is not None:
            self._go_on(req_id, arrival, client)
        return req_id not in self._arrivals

    def end(self, req_id: str) -> None:
        """The request waits no more; its pull ends."""
        arrival = self._arrivals.pop(req_id, None)
        if arrival is not None and arrival.pull is not None:
            self._running -= 1
            arrival.pull.cancel()

    def poll(self, client: StoreClient | None) -> None:
        """Reads what has been answered, and sends what has its turn."""
        for req_id, arrival in list(self._arrivals.items()):
            self._go_on(req_id, arrival, client)

    def _go_on(self, req_id: str, arrival: _Arrival, client: StoreClient | None) -> None:
        if arrival.pull is not None and arrival.pull.done():
            self._running -= 1
            self._answered(req_id, arrival, arrival.pull)
        if arrival.pull is None and req_id in self._arrivals and self._running < MAX_PULLS:
            self._send(req_id, arrival, client)

    def _send(self, req_id: str, arrival: _Arrival, client: StoreClient | None) -> None:
        now, settings = self._clock(), self._settings
        left = arrival.started + settings.handoff_timeout_ms / 1000 - now
        if client is None or left <= 0:
            self._over(req_id, arrival, "no store" if client is None else "the time for it is over")
            return
        if now < arrival.not_before:
            return
        part, wait_ms = arrival.parts[0], arrival.source.wait_ms
        if wait_ms is None:
            wait_ms = settings.handoff_wait_ms
        wait = 0.0 if part.optional else min(wait_ms, settings.handoff_timeout_ms) / 1000
        seconds = min(left, OPTIONAL_SECONDS) if part.optional else left
        arrival.pull = client.pull_async(
            arrival.source.store, part.keys, parent=part.parent, seconds=seconds, wait_seconds=wait
        )
        self._running += 1

    def _answered(self, req_id: str, arrival: _Arrival, pull: Future[Pulled]) -> None:
        arrival.pull = None
        error = None if pull.cancelled() else pull.exception()
        if isinstance(error, CapacityError):
            arrival.not_before = self._clock() + RETRY_SECONDS
            return
        part = arrival.parts.popleft()
        if pull.cancelled() or error is not None:
            self._over(req_id, arrival, str(error or "cancelled"), part)
            return
        pulled = pull.result()
        self._stats.add(pulled_blocks=pulled.pulled, pulled_bytes=pulled.pulled * arrival.slot_bytes)
        if pulled.present < len(part.keys) and not part.optional:
            self._over(req_id, arrival, pulled.reason, part)
        elif not arrival.parts:
            self._over(req_id, arrival, "")

    def _over(self, req_id: str, arrival: _Arrival, reason: str, part: Part | None = None) -> None:
        del self._arrivals[req_id]
        self._stats.add(handoff_wait_seconds=self._clock() - arrival.started)
        if reason and not (part is not None and part.optional):
            self._failed(req_id, arrival.source, reason)

    def _failed(self, req_id: str, source: Source, reason: str) -> None:
        self._stats.add(incomplete_handoffs=1)
        logger.warning(
            "kvsieve: request %s: not all of its prompt came from %s, the rest is computed here: %s",
            req_id,
            source.store,
            reason,
        )


@dataclass(eq=False, slots=True)
class Departures:
    """Blocks of requests that ended here and go on elsewhere: kept from eviction until they are pulled."""

    lease_seconds: float
    _waiting: list[Sequence[bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether some are not kept yet."""
        return bool(self._waiting)

    def add(self, keys: Sequence[bytes]) -> None:
        """keys: a chain from its start; those that are sealed by then are kept."""
        self._waiting += [part.keys for part in parts_of(keys)]

    def poll(self, client: StoreClient | None, on_their_way: Container[bytes]) -> None:
        """Keeps those of which nothing is on its way to the store any more."""
        waiting = []
        for keys in self._waiting:
            if any(key in on_their_way for key in keys):
                waiting.append(keys)
            elif client is not None:
                client.hold_async(keys, seconds=self.lease_seconds).add_done_callback(_log_failure)
        self._waiting = waiting

    def forget(self) -> None:
        """The session is over: what was on its way did not arrive."""
        self._waiting = []


def _log_failure(done: Future[int]) -> None:
    if not done.cancelled() and (error := done.exception()):
        logger.warning("kvsieve: a finished prompt is not kept for its hand-off: %s", error)


def departure_params(attachment: Attachment, tokens: int) -> dict[str, Any]:
    """`kv_transfer_params` of the answer; tokens: of the prompt, whose KV is in the store."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvsieve_store": attachment.peer_address,
        "kvsieve_tokens": tokens,
    }
