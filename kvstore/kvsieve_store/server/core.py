"""What the services share: the state machine, the arena, the open streams, and the clock that drives them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store import __version__
from kvsieve_store.arena import Arena, SessionLock
from kvsieve_store.errors import KVSieveError, UnavailableError
from kvsieve_store.protocol.layout import ExtentLayout
from kvsieve_store.protocol.limits import (
    MAX_BATCH,
    MAX_CREDITS,
    MAX_LEASE_MS,
    MAX_MATCH_KEYS,
    SESSION_ID_BYTES,
)
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.server.clock import Clock
from kvsieve_store.server.streams import SessionStream, credits_message
from kvsieve_store.settings import StoreSettings
from kvsieve_store.state import Grant, Sealed, Session, StateSettings, StoreState, U32Array

if TYPE_CHECKING:
    from kvsieve_store.directory.directory import Directory
    from kvsieve_store.peers.peers import Peers

_log = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05
_HEARTBEATS_PER_TIMEOUT = 4


@dataclass(frozen=True, eq=False)
class InnerSession:
    """A session of the store's own."""

    session: Session

    @property
    def session_id(self) -> bytes:
        return self.session.session_id

    @property
    def layout(self) -> ExtentLayout:
        """Of its pool."""
        return self.session.layout


class Core:
    """Runs in the event loop's thread only; only drain() waits.

    phase, prefaulted: what Admin.Status says.
    instance: 16 random bytes, of this store process.
    listening: addresses that are served.
    has_fencing: set while ended sessions wait for their lock file.
    draining: set once a drain has begun.
    stop_requested: set when the process is to end.
    peers: other stores; None until the store is ready.
    directory: what they hold; None when it is local, so that nobody is told and nobody found.
    """

    def __init__(
        self,
        settings: StoreSettings,
        arena: Arena,
        stop_requested: asyncio.Event,
        monotonic: Callable[[], float] = time.monotonic,
        directory: Directory | None = None,
    ) -> None:
        """monotonic: seconds, from which the store's clock takes its time."""
        self.settings = settings
        self.arena = arena
        self.state = StoreState(
            StateSettings(
                extent_bytes=settings.extent_size,
                extents=settings.extents,
                pool_quota_bytes=settings.pool_quota,
                quotas=settings.quotas,
                session_timeout=settings.session_timeout,
                max_sessions=settings.max_sessions,
                free_low=settings.free_low,
                free_high=settings.free_high,
            ),
            directory,
        )
        self.instance = secrets.token_bytes(16)
        self.phase: Literal["prefaulting", "ready", "draining"] = "prefaulting"
        self.prefaulted = 0.0
        self.listening: list[str] = []
        self.has_fencing = asyncio.Event()
        self.draining = asyncio.Event()
        self.stop_requested = stop_requested
        self._monotonic = monotonic
        self._clock = Clock(monotonic)
        self._started = monotonic()
        self._drain: asyncio.Task[int] | None = None
        self._streams: dict[bytes, SessionStream] = {}
        self._locks: dict[bytes, SessionLock] = {}
        self._inner: dict[bytes, InnerSession] = {}
        self.peers: Peers | None = None
        self.directory = directory

    def now(self) -> float:
        """Monotonic seconds, without those in which the process stood still."""
        return self._clock.now()

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self._monotonic() - self._started

    def why_not_ready(self) -> str | None:
        """Why the store serves no engines now; None when it does."""
        if self.phase == "prefaulting":
            return f"the store prefaults its arena: {self.prefaulted:.0%} done; try again"
        if self.phase == "draining":
            return "the store is draining: it is about to stop"
        if missing := self.arena.missing():
            return f"arena: {missing} is gone, and with it the way to attach; restart the store"
        return None

    @property
    def peer_address(self) -> str:
        """Control address that other stores are told; empty when this one serves no peers."""
        if self.settings.peer_address is None:
            return ""
        tcp = (text.removeprefix("tcp://") for text in self.listening if not text.startswith("unix:"))
        return self.settings.peer_advertise or next(tcp, self.listening[0])

    # Sessions

    def open_session(self, hello: pb.Hello) -> SessionStream:
        """Attaches an engine: its stream's first message is Welcome. Raises errors of StoreState.attach."""
        if reason := self.why_not_ready():
            raise UnavailableError(reason)
        spec = PoolSpec.from_proto(hello.pool)
        session_id = secrets.token_bytes(SESSION_ID_BYTES)
        lock = self.arena.new_session_lock()
        try:
            session, grant = self.state.attach(
                spec,
                engine_id=hello.engine_id,
                client=hello.client,
                pid=hello.pid,
                credit_target=hello.credit_target,
                session_id=session_id,
                now=self.now(),
            )
        except BaseException:
            lock.discard()
            raise
        stream = SessionStream(
            session_id, session.layout, f"{hello.engine_id!r} (pool {spec.name!r}, pid {hello.pid})"
        )
        self._streams[session_id] = stream
        self._locks[session_id] = lock
        self.prepare(session_id, grant)
        stream.send(pb.AttachResponse(welcome=self._welcome(stream, spec, lock, grant)))
        _log.info("session %s attached: %s", stream.short_id, stream.name)
        return stream

    def end_session(self, session_id: bytes, reason: str) -> None:
        """Ends a session and its stream. Does nothing when it has ended already."""
        stream = self._streams.pop(session_id, None)
        if stream is None:
            return
        stream.end(UnavailableError(f"the session has ended: {reason}"))
        self.state.end_session(session_id, self.now())
        _log.info("session %s of %s ended: %s", stream.short_id, stream.name, reason)
        self.check_fencing()

    def check_fencing(self) -> None:
        """Lets go of the ended sessions whose lock file nobody holds any more."""
        for session_id in self.state.fencing():
            if self._locks[session_id].is_free():
                del self._locks[session_id]
                self.state.fenced(session_id)
        if self.state.fencing():
            self.has_fencing.set()
        else:
            self.has_fencing.clear()

    # Sessions of the store's own

    def open_inner_session(self, spec: PoolSpec, name: str) -> InnerSession:
        """A session without an engine: its slots and leases are touched by this process alone. It has no
        credits and no time-out, and lasts until end_inner_session(). name: in listings. Raises as
        open_session()."""
        if reason := self.why_not_ready():
            raise UnavailableError(reason)
        session, _ = self.state.attach(
            spec,
            engine_id=name[:256],
            client=f"kvsieve-store/{__version__}",
            pid=os.getpid(),
            credit_target=0,
            session_id=secrets.token_bytes(SESSION_ID_BYTES),
            now=self.now(),
        )
        inner = InnerSession(session)
        self._inner[session.session_id] = inner
        return inner

    def reserve_inner(self, inner: InnerSession, count: int) -> Grant:
        """Slots for it, as many as can be had."""
        grant = self.state.reserve(inner.session_id, count, self.now())
        if len(grant):
            self.arena.write_generations(inner.layout, grant.slots, grant.generations)
        return grant

    def give_back_inner(self, inner: InnerSession, grant: Grant) -> None:
        """Takes slots back that nobody writes to any more."""
        self.state.release(inner.session_id, (), grant.slots, grant.generations, self.now())

    def end_inner_session(self, inner: InnerSession) -> None:
        """Gives back its slots and leases, which nobody may touch any more. Does nothing when it has
        ended."""
        if self._inner.pop(inner.session_id, None) is not None:
            self.state.end_session(inner.session_id, self.now())
            self.state.fenced(inner.session_id)

    # Blocks

    def seal(
        self,
        session_id: bytes,
        keys: bytes,
        parents: bytes,
        slots: U32Array,
        generations: U32Array,
        lease_ms: int = 0,
        lease_id: int = 0,
    ) -> Sealed:
        """StoreState.seal(), and tells who waits for one of the blocks."""
        sealed = self.state.seal(
            session_id, keys, parents, slots, generations, self.now(), lease_ms, lease_id
        )
        if self.peers is not None:
            self.peers.offers.came(self.state.session(session_id).pool_id, keys)
        return sealed

    def announce(
        self, session_id: bytes, keys: bytes, slots: U32Array, generations: U32Array, hold_ms: int
    ) -> None:
        """StoreState.announce(), and tells who waits for one of the blocks. Nothing is held in a store that
        serves no peers."""
        hold_ms = hold_ms if self.settings.peer_address is not None else 0
        self.state.announce(session_id, keys, slots, generations, self.now(), hold_ms)
        if self.peers is not None:
            self.peers.offers.came(self.state.session(session_id).pool_id, keys)

    # Grants

    def prepare(self, session_id: bytes, grant: Grant) -> None:
        """Writes the headers of granted slots; must come before the grant leaves."""
        if len(grant.slots):
            self.arena.write_generations(self._streams[session_id].layout, grant.slots, grant.generations)

    # Time

    def tick(self) -> None:
        """Once a second: leases and sessions that ran out, eviction ahead, credits for who lacks them."""
        if lost := self._clock.tick():
            _log.warning("the store stood still for %.1f s; its engines get that time back", lost)
        now = self.now()
        for inner in self._inner.values():
            self.state.heartbeat(inner.session_id, list(inner.session.leases), now)
        for session_id in self.state.tick(now):
            self.end_session(session_id, f"silent for {self.settings.session_timeout:g} s")
        # What a client does not read would pile up here.
        behind = {session_id for session_id, stream in self._streams.items() if stream.is_behind}
        for session_id, grant in self.state.top_up(now, behind):
            self.prepare(session_id, grant)
            self._streams[session_id].send(pb.AttachResponse(credits=credits_message(grant)))

    async def drain(self, seconds: float) -> int:
        """Refuses new work, tells all engines, waits up to `seconds`, then requests the stop.

        Returns the leases left. Goes on when the caller goes away; a second call joins the first.
        """
        if self._drain is None:
            self._drain = asyncio.create_task(self._run_drain(seconds))
        return await asyncio.shield(self._drain)

    async def _run_drain(self, seconds: float) -> int:
        _log.info("draining: waiting up to %g s for leases", seconds)
        self.phase = "draining"
        self.draining.set()
        self.state.drain()
        for stream in self._streams.values():
            stream.send(pb.AttachResponse(draining=pb.Draining(deadline_ms=int(seconds * 1000))))
        deadline = self.now() + seconds
        while True:
            leases = self.state.totals().leases
            if not leases or self.now() >= deadline:
                _log.info("drained: %d leases left", leases)
                self.stop_requested.set()
                return leases
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    def close_streams(self, error: KVSieveError) -> None:
        """Ends all streams with an error, for the end of the process."""
        for stream in self._streams.values():
            stream.end(error)

    def close(self) -> None:
        """Ends a drain and removes the lock files, for the end of the process."""
        if self._drain is not None:
            self._drain.cancel()
        for lock in self._locks.values():
            lock.discard()

    def _welcome(self, stream: SessionStream, spec: PoolSpec, lock: SessionLock, grant: Grant) -> pb.Welcome:
        timeout_ms = int(self.settings.session_timeout * 1000)
        return pb.Welcome(
            session_id=stream.session_id,
            pool_id=spec.pool_id(),
            arena=pb.Arena(
                instance=self.instance,
                extent_bytes=self.settings.extent_size,
                segments=[pb.Segment(path=str(s.path), bytes=s.size) for s in self.arena.segments],
            ),
            slot_bytes=stream.layout.slot_bytes,
            slots_per_extent=stream.layout.slots_per_extent,
            slots_offset=stream.layout.slots_offset,
            lock_path=str(lock.path),
            heartbeat_interval_ms=max(timeout_ms // _HEARTBEATS_PER_TIMEOUT, 1),
            session_timeout_ms=timeout_ms,
            limits=pb.Limits(
                max_match_keys=MAX_MATCH_KEYS,
                max_batch=MAX_BATCH,
                max_lease_ms=MAX_LEASE_MS,
                max_credits=MAX_CREDITS,
            ),
            credits=credits_message(grant),
            store_version=__version__,
            peer_address=self.peer_address,
            directory=self.directory is not None,
            max_slots=self.state.session(stream.session_id).pool.quota * stream.layout.slots_per_extent,
        )
