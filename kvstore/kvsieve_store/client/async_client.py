"""The client's core: keeps a session with the store, for ever, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import Literal, overload

import grpc

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store import __version__
from kvsieve_store.client.backoff import LONGEST_SECONDS, Backoff
from kvsieve_store.client.batches import check_entries, check_lease, check_release
from kvsieve_store.client.channel import CHANNEL_OPTIONS
from kvsieve_store.client.checks import (
    MAX_SECONDS,
    MAX_TEXT,
    MAX_TIMEOUT,
    UINT32,
    check_key,
    check_seconds,
    check_text,
    check_whole,
    join_chain,
    join_keys,
)
from kvsieve_store.client.endpoint import grpc_target
from kvsieve_store.client.handles import (
    Attachment,
    ClientState,
    Fetch,
    Held,
    Match,
    Pulled,
    SealEntry,
    SealResult,
    SlotRef,
)
from kvsieve_store.client.session import Session, Terms
from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    KVSieveError,
    PoolMismatchError,
    UnavailableError,
)
from kvsieve_store.protocol.limits import PROTOCOL_VERSION
from kvsieve_store.protocol.spec import PoolSpec

log = logging.getLogger(__name__)

MIN_LEASE_MS = 100
"""A lease is renewed each third of its length: a shorter one would keep both sides busy."""

REFUSED_RETRY_SECONDS = 30.0
"""Between tries while the store refuses this client: somebody has to change something first."""


class AsyncStoreClient:
    """Attaches in the background and attaches anew whenever the session is lost.

    Everything belongs to the event loop that start() ran in, except take_credits(), credits, state, error and
    attachment, which any thread may use. Verbs raise UnavailableError at once while there is no session.
    """

    def __init__(
        self,
        endpoint: str,
        spec: PoolSpec,
        *,
        engine_id: str,
        credit_target: int = 256,
        lease_ms: int = 60_000,
        timeout: float = 5.0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """
        endpoint: "unix:///path", "tcp://host:port" or "host:port".
        spec: the pool to use; its name, and what its blocks are.
        engine_id: names the engine in listings and logs.
        credit_target: slots to keep granted ahead; 0 for a client that only reads.
        lease_ms: length of the leases that match() takes, and seal() with hold, milliseconds. Held leases are
            renewed; the length matters once the client is gone. 0: no leases; else at least MIN_LEASE_MS.
        timeout: deadline of each call, seconds.
        on_change: called with the new state, once per change, in the event loop: it must not block.
        """
        self._target = grpc_target(endpoint)
        check_text("engine_id", engine_id, MAX_TEXT)
        check_whole("credit_target", credit_target, 0, UINT32)
        check_whole("lease_ms", lease_ms, 0, UINT32)
        if lease_ms and lease_ms < MIN_LEASE_MS:
            raise InvalidRequestError(f"lease_ms: {lease_ms} given, 0 or {MIN_LEASE_MS} and more allowed")
        check_seconds("timeout", timeout, MAX_TIMEOUT)
        self.endpoint = endpoint
        self.state = ClientState.CONNECTING
        self.error: KVSieveError | None = None
        self._terms = Terms(endpoint, timeout, lease_ms)
        self._hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            pool=spec.to_proto(),
            engine_id=engine_id,
            client=f"kvsieve-client/{__version__}",
            credit_target=credit_target,
        )
        self._on_change = on_change
        self._epoch = 0
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def attachment(self) -> Attachment | None:
        """Of the current session; None while there is none."""
        session = self._session
        return session.attachment if session else None

    @property
    def credits(self) -> int:
        """Slots that take_credits() could give now."""
        session = self._session
        return len(session.credits) if session else 0

    def start(self) -> None:
        """Begins to connect in the running event loop. Raises UnavailableError once closed."""
        if self.state is ClientState.CLOSED:
            raise UnavailableError("the client is closed")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_attached(self, timeout: float) -> Attachment:  # noqa: ASYNC109 (same as StoreClient)
        """Raises the store's refusal (PoolMismatchError, InvalidRequestError, CapacityError) as soon as it is
        there, UnavailableError after `timeout` seconds or when the client is closed."""
        check_seconds("timeout", timeout, zero=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    if self.state is ClientState.ATTACHED and self._session:
                        return self._session.attachment
                    if self.state in (ClientState.REFUSED, ClientState.CLOSED) and self.error:
                        raise _bare(self.error)
                    await self._changed.wait()
        raise UnavailableError(f"not attached after {timeout:g} s: {self.error or 'no answer yet'}")

    def take_credits(self, n: int, *, epoch: int | None = None) -> list[SlotRef]:
        """At most `n` free slots to write to, fewer when the store has not granted more. Never waits.

        None when `epoch` is not the current one. Without it, read attachment.epoch before the call, not
        after: slots of a newer session then fail with the older epoch, instead of the other way round.
        """
        check_whole("n", n, 0, UINT32)
        session = self._session
        if session is None or self.state is not ClientState.ATTACHED:
            return []
        return session.credits.take(n) if epoch in (None, session.attachment.epoch) else []

    async def match(self, keys: bytes | Sequence[bytes], *, fetch: Fetch | None = None) -> Match:
        """Longest sealed prefix of `keys` (in chain order), leased until released or the session ends.

        fetch: lets a store that has a directory bring what is missing from other stores first. What it does
        not get in time, or can't, is not matched; that is no error.
        """
        joined = join_keys(keys)
        session = self._live()
        if self.state is ClientState.DRAINING:
            raise UnavailableError(f"the store at {self.endpoint} is draining")
        return await session.match(joined, fetch) if joined else Match()

    async def pull(
        self,
        source: str,
        keys: bytes | Sequence[bytes],
        *,
        parent: bytes = b"",
        seconds: float = 30.0,
        wait_seconds: float = 0.0,
    ) -> Pulled:
        """Lets the store bring blocks from another one, in the order of the keys (a chain, at most 4,096).

        source: control address of the other store. parent: key of the block before the first; empty for the
        first of a chain. seconds: the longest that it may take; what has come by then stays.
        wait_seconds: how long to wait, without a new block, for those that the other store has not got yet.
        Raises InvalidRequestError, CapacityError (too many pulls), UnavailableError (nothing came; the
        reason is the store's or the peer's).
        """
        check_text("source", source, MAX_TEXT)
        joined = join_chain(keys)
        check_key("parent", parent, or_none=True)
        check_seconds("seconds", seconds, MAX_SECONDS)
        check_seconds("wait_seconds", wait_seconds, MAX_SECONDS, zero=True)
        return await self._live().pull(source, joined, parent, seconds, wait_seconds)

    async def hold(self, keys: bytes | Sequence[bytes], *, seconds: float) -> int:
        """Keeps sealed blocks (a chain, at most 4,096) from eviction until another store has pulled the last
        of them, or `seconds` have passed; also when this session ends before. Returns how many of them, from
        the first on, were there. Raises InvalidRequestError, CapacityError (too many hand-offs)."""
        joined = join_chain(keys)
        check_seconds("seconds", seconds, MAX_SECONDS)
        return await self._live().hold(joined, seconds)

    @overload
    async def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[False] = False
    ) -> list[SealResult]: ...
    @overload
    async def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[True], lease: int = 0
    ) -> Held: ...
    async def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: bool = False, lease: int = 0
    ) -> list[SealResult] | Held:
        """Makes written slots findable by key and immutable; one result per entry.

        Seals are done in the order of the calls. Beyond the store's batch limit they go in several steps, of
        which each is all or nothing. Raises UnavailableError when `epoch` is over, SlotNotHeldError and
        InvalidRequestError, which name the entry.

        hold: for who goes on reading these slots. What is sealed is leased in the same step, and the slot of
        a duplicate stays the caller's, until released or the session ends. A hold that raises left neither.
        lease: with hold, adds to this lease of the epoch; 0, or one that is gone: makes a new one. So who
        seals again and again has one lease in all. What a hold that raises had added stays in it.
        Raises CapacityError when the session has leased too much, InvalidRequestError from a client without
        leases (lease_ms 0), and for a lease without hold.
        """
        check_entries(entries)
        check_lease(hold, lease)
        session = self._live(epoch)
        if hold and not self._terms.lease_ms:
            raise InvalidRequestError("hold: this client takes no leases (lease_ms is 0)")
        held = await session.seal(entries, hold=hold, lease=lease) if entries else Held()
        return held if hold else held.results

    async def announce(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold_seconds: float = 0.0
    ) -> None:
        """Says which keys slots will be sealed under that are being written now, so that other stores can
        read them as layers land (ArenaMap.set_layers_done); no match finds them. It ends with the seal, the
        slot or the session.

        hold_seconds: from their seal on the blocks are kept for another store: until it has pulled them,
        hold() has named them, or so many seconds have passed, and no longer than the session lasts. 0: they
        may be evicted. Raises UnavailableError when `epoch` is over, SlotNotHeldError and
        InvalidRequestError, which name the entry.
        """
        check_entries(entries)
        check_seconds("hold_seconds", hold_seconds, MAX_SECONDS, zero=True)
        await self._live(epoch).announce(entries, hold_seconds)

    async def release(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> None:
        """Gives back leases and slots that will not be sealed. Raises UnavailableError when `epoch` is over
        (both are back already then), SlotNotHeldError."""
        check_release(lease_ids, refs)
        await self._live(epoch).release(lease_ids, refs)

    async def reserve(self, count: int) -> int:
        """Asks for `count` credits beyond the target, for a burst; returns how many came."""
        check_whole("count", count, 1, UINT32)
        return await self._live().reserve(count)

    async def close(self) -> None:
        """Gives back unused credits and ends the session; final. May be called again."""
        self._change(ClientState.CLOSED, UnavailableError("the client is closed"))
        if self._session:
            await self._session.close()
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            # A cancelled task keeps its frames, and with them the channel.
            self._task = None

    def _live(self, epoch: int | None = None) -> Session:
        session = self._session
        if session is None or self.state is ClientState.CLOSED:
            reason = self.error or f"no answer from {self.endpoint} yet"
            raise UnavailableError(f"no session with the store ({self.state}): {reason}")
        if epoch is not None and epoch != session.attachment.epoch:
            raise UnavailableError(
                f"epoch: {epoch} given, which is over; the session is of epoch {session.attachment.epoch}"
            )
        return session

    async def _run(self) -> None:
        backoff = Backoff(random.Random())
        while True:
            started = asyncio.get_running_loop().time()
            try:
                error = await self._one_session()
            except KVSieveError as refusal:
                error = refusal
            except Exception as bug:
                log.exception("kvsieve client: unexpected error")
                error = UnavailableError(repr(bug))
            if isinstance(error, (CapacityError, InvalidRequestError, PoolMismatchError)):
                self._change(ClientState.REFUSED, error)
                await asyncio.sleep(REFUSED_RETRY_SECONDS)
                continue
            self._change(ClientState.CONNECTING, error)
            if asyncio.get_running_loop().time() - started > 2 * LONGEST_SECONDS:
                backoff.reset()
            await asyncio.sleep(backoff.wait())

    async def _one_session(self) -> KVSieveError:
        """From Hello to the end of the session; returns why it ended. Raises when there was no Welcome."""
        self._hello.pid = os.getpid()
        async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
            session = await Session.attach(channel, self._hello, self._terms, self._epoch + 1)
            self._epoch += 1
            self._session = session
            self._change(ClientState.ATTACHED, None)
            try:
                why = await session.run(self._draining)
            finally:
                self._session = None
                session.end(UnavailableError("the client is closed"))
        return why if isinstance(why, UnavailableError) else UnavailableError(str(why))

    def _draining(self) -> None:
        self._change(ClientState.DRAINING, UnavailableError(f"the store at {self.endpoint} is about to stop"))

    def _change(self, state: ClientState, error: KVSieveError | None) -> None:
        if self.state is ClientState.CLOSED:
            return
        is_news = state is not self.state
        if is_news or (error and not self.error):
            # Who gets on_change tells people in its own words.
            calm = error is None or state is ClientState.CLOSED or self._on_change is not None
            reason = f" ({error})" if error else ""
            log.log(
                logging.INFO if calm else logging.WARNING, "store at %s: %s%s", self.endpoint, state, reason
            )
        self.error = _bare(error) if error else None
        if not is_news:
            return
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._on_change:
            try:
                self._on_change(state)
            except Exception:
                log.exception("on_change(%r) failed", str(state))


def _bare(error: KVSieveError) -> KVSieveError:
    """The same error without traceback and context, which would keep a dead session alive."""
    return type(error)(*error.args)
