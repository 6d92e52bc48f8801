"""Pull: brings blocks from another store."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from kvsieve_store.addresses import TcpAddress, UnixAddress, parse_address
from kvsieve_store.client.backoff import Backoff
from kvsieve_store.client.channel import CHANNEL_OPTIONS, call_error
from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    KVSieveError,
    LinkError,
    NotFoundError,
    UnavailableError,
)
from kvsieve_store.peers.links import PeerLinks
from kvsieve_store.peers.plan import PullPlan
from kvsieve_store.peers.plane import DIGEST_BYTES, SHORT_BYTES, DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH
from kvsieve_store.server.core import Core, InnerSession
from kvsieve_store.state import Grant, Session
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import U64Array

_log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_BYTES = 32 << 20
"""Of one read: a link is shared by turns of so many."""

READ_SECONDS = 15.0
"""For one read of a batch."""

ANSWER_SECONDS = 2.5
"""For the answer to an offer, beside its wait and digests; for a peer that fails, if a pull has no wait."""

DIGEST_SECONDS = 4 / (1 << 30)  # of a byte

WITHDRAW_SECONDS = 2.0
"""To tell the peer that it may have its blocks back; it takes them back by itself after OFFER_MS."""

OFFER_MS = 15_000
"""Of an offer unless it is renewed: for so long a peer that is gone keeps blocks in another store."""

RENEW_SECONDS = 4.0

HERE_MS = 120_000
"""Lease of what the pull has brought, or found here; it ends with the pull."""

WAIT_SLICE_SECONDS = 10.0
"""A wait for blocks at the other store is asked for again so often."""

EMPTY_SECONDS = 0.05
"""Pause after an offer without blocks: a store that does not wait is not asked in a loop."""

ATTEMPTS = 4
MAX_PULLS = 256
MAX_SOURCE = 256
MAX_TIMEOUT_MS = 600_000

_PEER_OPTIONS = (
    *(each for each in CHANNEL_OPTIONS if not each[0].startswith("grpc.keepalive")),
    # A store that comes back is reached within about a second; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The time to connect, too. A wire that is cut, or a store that hangs, is noticed as soon as in a read.
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_500),
)

_NO_KEY = bytes(KEY_BYTES)


class Puller:
    """Runs in the event loop's thread. Slots that a read may write to belong to a session of the store's own,
    and are given to nobody else before the read is known to be over."""

    def __init__(self, core: Core, plane: DataPlane, links: PeerLinks) -> None:
        self._core = core
        self._plane = plane
        self._links = links
        self._running: dict[asyncio.Timeout, tuple[Session, _Pull]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.claims: dict[tuple[str, bytes, bytes], _Pull] = {}
        """(source, pool id, key) -> the pull that brings the block; others of the same source wait for it."""
        self.waits = 0
        """Times that a pull waited for blocks that the other store had not got; only grows."""

    @property
    def pulls(self) -> int:
        """Under way."""
        return len(self._running)

    async def pull(self, request: pb.PullRequest) -> pb.PullResponse:
        """Raises what kvsieve.v1.Peer.Pull says."""
        session = self._core.state.session(request.session_id)
        keys = keys_of(request)
        plan, error = await self.bring(session, request, keys)
        if error is not None and not plan.present:
            raise UnavailableError(f"pull from {request.source}: {plan.reason}")
        return pb.PullResponse(
            present=plan.present, pulled=plan.pulled, damaged=plan.damaged, reason=plan.reason
        )

    async def bring(
        self, session: Session, request: pb.PullRequest, keys: Sequence[bytes], *, is_fetch: bool = False
    ) -> tuple[PullPlan, KVSieveError | None]:
        """Brings the keys into the session's pool from the request's source; the plan at its end, and the
        last error of the peer.

        is_fetch: from a store that the directory named: it is tried once, and what is held there for a
        hand-off stays held. Raises InvalidRequestError (source), CapacityError, UnavailableError (this store
        is not ready).
        """
        target = self._target(request.source)
        if self.pulls + len(self._closing) >= MAX_PULLS:
            raise CapacityError(f"pulls: {MAX_PULLS} are under way, the most; try again later")
        inner = self._core.open_inner_session(session.pool.spec, f"peer (pull from {request.source})")
        pull = _Pull(self, inner, target, keys, request, is_fetch)
        deadline = asyncio.timeout(request.timeout_ms / 1000)
        self._running[deadline] = (session, pull)
        try:
            async with deadline:
                await pull.run()
        except TimeoutError:
            pull.plan.stop(
                "session_id: the session has ended"
                if session.ended
                else f"timeout_ms: {request.timeout_ms} ms have passed"
            )
        finally:
            del self._running[deadline]
            # Behind the answer: nobody who waits for these blocks waits for the peer to have its own back.
            closing = asyncio.create_task(pull.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return pull.plan, pull.error

    def coming(self, pool_id: bytes, key: bytes) -> asyncio.Event | None:
        """When a pull, from whichever store, brings the block: what is set once it has brought some, or is
        over."""
        for source in {pull.source for _, pull in self._running.values()}:
            owner = self.claims.get((source, pool_id, key))
            if owner is not None:
                return owner.moved
        return None

    def tick(self) -> None:
        """Ends the pulls of sessions that have ended."""
        for deadline, (session, _) in self._running.items():
            if session.ended and not deadline.expired():
                deadline.reschedule(0)

    async def close(self) -> None:
        """Returns once the peers have their blocks back, as far as they listen."""
        if self._closing:
            await asyncio.wait(self._closing)

    def _target(self, source: str) -> str:
        """What gRPC connects to. Raises InvalidRequestError."""
        if not 1 <= len(source) <= MAX_SOURCE:
            raise InvalidRequestError(f"source: {len(source)} characters given, 1 to {MAX_SOURCE} allowed")
        try:
            address = parse_address(source)
        except ValueError as error:
            raise InvalidRequestError(f"source: {error}") from None
        if isinstance(address, UnixAddress):
            return address.grpc_target
        assert isinstance(address, TcpAddress)
        if not address.is_loopback and not self._core.settings.allow_insecure_tcp:
            raise InvalidRequestError(
                f"source: {source} is not a loopback address, and TCP here is neither encrypted nor "
                "authenticated; to pull from there all the same start the store with --allow-insecure-tcp"
            )
        return address.host_port


class _Pull:
    """One of them."""

    def __init__(
        self,
        puller: Puller,
        inner: InnerSession,
        target: str,
        keys: Sequence[bytes],
        request: pb.PullRequest,
        is_fetch: bool,
    ) -> None:
        self._puller = puller
        self._core, self._plane, self._links = puller._core, puller._plane, puller._links
        self._inner = inner
        self._pool_id = inner.session.pool_id
        self.source = request.source
        self._wait_seconds = request.wait_ms / 1000
        self._is_fetch = is_fetch
        self._lease_id = 0
        self._target = target
        self._open_channel()
        self._keys = keys
        self._parents = [request.parent or _NO_KEY, *keys]
        self._offer = pb.OfferResponse()
        self._renewing: asyncio.Task[None] | None = None
        self._offering: asyncio.Future[pb.OfferResponse] | None = None
        self._offering_waits = False
        self._first = 0
        self._description: Description | None = None
        self._backoff = Backoff(random.Random())
        slot_bytes = inner.layout.slot_bytes
        batch = max(1, min(BATCH_BYTES // slot_bytes, MAX_BATCH))
        self.plan = PullPlan(len(keys), batch=batch, attempts=1 if is_fetch else ATTEMPTS)
        self.error: KVSieveError | None = None
        self._moved_at = 0.0
        self._failing_since: float | None = None
        self._leaving: list[asyncio.Task[None]] = []
        self.moved = asyncio.Event()
        """Set, and another one made, when blocks have come or the pull is over."""

    async def run(self) -> None:
        """To the end of the plan; errors of the peer's end it as its reason. close() has to follow."""
        plan = self.plan
        self._moved_at = asyncio.get_running_loop().time()
        self._look_here()
        try:
            while plan.step != "done":
                try:
                    await (self._ask() if plan.step == "offer" else self._read())
                except (LinkError, UnavailableError, CapacityError) as error:
                    await self._again(error)
                except KVSieveError as error:
                    self.error = error
                    plan.stop(str(error))
        finally:
            self._unclaim()

    async def close(self) -> None:
        """Gives the peer its blocks back, and the store the session."""
        try:
            await self._end_offering()
            await self._leave()
            await asyncio.gather(*self._leaving)
        finally:
            self._core.end_inner_session(self._inner)

    def _open_channel(self) -> None:
        """One of the pull's own, and a new one after a failure: gRPC's back-off would come on top of ours."""
        self._channel = grpc.aio.insecure_channel(self._target, options=_PEER_OPTIONS)
        self._stub: Any = peer_pb2_grpc.PeerStub(self._channel)  # type: ignore[no-untyped-call]

    def _leave(self) -> Coroutine[Any, Any, None]:
        """_withdraw(), and the end of the channel."""

        async def leave(channel: grpc.aio.Channel, given_back: Awaitable[None]) -> None:
            await given_back
            await channel.close()

        return leave(self._channel, self._withdraw())

    def _look_here(self) -> None:
        """Counts what this store has of the blocks that are missing, and keeps it until the end."""
        core, plan = self._core, self.plan
        missing = b"".join(self._keys[plan.present :])
        if core.state.has(self._pool_id, missing[:KEY_BYTES]):
            here = core.state.match(self._inner.session_id, missing, HERE_MS, core.now())
            plan.found(len(here.slots))
            self._move()

    def _move(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()
        self._failing_since = None
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()

    # Pulls of the same blocks: one brings them, the others wait for it

    def _claim(self) -> asyncio.Event | None:
        """Claims the blocks that are missing and that no other pull brings; what to wait for when another one
        brings the first."""
        claims, missing = self._puller.claims, self._keys[self.plan.present :]
        owner = claims.setdefault((self.source, self._pool_id, missing[0]), self)
        if owner is not self:
            return owner.moved
        for key in missing:
            claims.setdefault((self.source, self._pool_id, key), self)
        return None

    def _unclaim(self) -> None:
        claims = self._puller.claims
        for key in self._keys:
            place = (self.source, self._pool_id, key)
            if claims.get(place) is self:
                del claims[place]
        self._move()

    async def _again(self, error: KVSieveError) -> None:
        self.error = error
        self.plan.broke(str(error))
        _log.info("pull from %s: %s", self.source, error)
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
        # Behind: a peer that fails may not answer.
        self._leaving.append(asyncio.create_task(self._leave()))
        self._offering = None  # it is over
        self._open_channel()
        if self.plan.step != "done":
            await asyncio.sleep(min(self._backoff.wait(), self._patience()))
            if not self._patience():
                self.plan.stop(str(error))

    def _patience(self) -> float:
        """Seconds that a peer which fails is tried for from now on: who waits for blocks waits for the peer
        no longer than for a block."""
        if self._failing_since is None or self._is_fetch:
            return math.inf
        until = self._failing_since + (self._wait_seconds or ANSWER_SECONDS)
        return max(until - asyncio.get_running_loop().time(), 0.0)

    async def _ask(self) -> None:
        await self._withdraw()
        loop = asyncio.get_running_loop()
        left = max(self._moved_at + self._wait_seconds - loop.time(), 0.0)
        if (others := self._claim()) is not None:
            try:
                async with asyncio.timeout(left if self._wait_seconds else None):
                    await others.wait()
                self._look_here()
            except TimeoutError:  # who brings them may have more patience
                self.plan.offered(0)
            return
        self._first = self.plan.present
        wait = min(left, WAIT_SLICE_SECONDS)
        request = pb.OfferRequest(
            pool_id=self._pool_id,
            keys=b"".join(self._keys[self._first :]),
            lease_ms=OFFER_MS,
            digests=True,
            wait_ms=int(wait * 1000),
        )
        slot_bytes = self._inner.layout.slot_bytes
        hashing = slot_bytes * (len(self._keys) - self._first) * DIGEST_SECONDS
        patience = min(wait + ANSWER_SECONDS + hashing, self._patience())
        call = self._call("Offer", self._stub.Offer(request, timeout=patience))
        self._offering = asyncio.ensure_future(call)
        self._offering_waits = wait > 0
        offer = self._offer = await asyncio.shield(self._offering)
        self._offering = None
        if offer.blocks:
            if not (
                offer.blocks <= len(self._keys) - self._first
                and offer.slot_bytes == slot_bytes
                and len(offer.digests) == offer.blocks * DIGEST_BYTES
                and len(offer.token) == 16
            ):
                raise InvalidRequestError(
                    f"offer: {offer.blocks} blocks of {offer.slot_bytes} bytes, {len(offer.digests)} bytes "
                    f"of digests; {slot_bytes} bytes a block expected"
                )
            self._description = Description.of(offer.description)
            self._renewing = asyncio.ensure_future(self._renew(offer.token))
        self.plan.offered(offer.blocks, more_may_come=left > 0)
        if not offer.blocks and left > 0:
            self._puller.waits += 1
            await asyncio.sleep(EMPTY_SECONDS)
            self._look_here()

    async def _read(self) -> None:
        """One batch: slots, bytes, digests, seal."""
        core, plan = self._core, self.plan
        grant = core.reserve_inner(self._inner, plan.next_batch())
        count = len(grant)
        if not count:
            plan.stop("slots: none is free, and none can be freed")
            return
        try:
            at = plan.present - self._first
            size = self._inner.layout.slot_bytes
            ranges = np.zeros((count, 3), np.uint64)
            ranges[:, 0] = np.arange(at, at + count)
            ranges[:, 2] = size
            into = self._inner.layout.slot_addresses(grant.slots)
            assert self._description is not None
            try:
                await self._links.read(
                    self.source, self._description, self._offer.token, ranges, into, READ_SECONDS
                )
            except NotFoundError as error:  # the offer has run out: it is asked for anew
                raise UnavailableError(str(error)) from None
            wanted = self._offer.digests[at * DIGEST_BYTES : (at + count) * DIGEST_BYTES]
            check = partial(_sound, self._plane, into, size, wanted)
            good = check() if count * size <= SHORT_BYTES else await in_thread(self._plane.hashers, check)
        except BaseException:
            core.give_back_inner(self._inner, grant)
            raise
        self._seal(grant, good)
        plan.landed(count, good)
        counters = self._links.counters_of(self.source)
        counters.pulled += good
        counters.damaged += good < count
        if good:
            self._backoff.reset()
            self._move()

    def _seal(self, grant: Grant, good: int) -> None:
        first = self.plan.present
        if good:
            # Leased, so that the first blocks are still there when the last ones come.
            sealed = self._core.seal(
                self._inner.session_id,
                b"".join(self._keys[first : first + good]),
                b"".join(self._parents[first : first + good]),
                grant.slots[:good],
                grant.generations[:good],
                HERE_MS,
                self._lease_id,
            )
            self._lease_id = sealed.lease_id or self._lease_id
        self._core.give_back_inner(self._inner, Grant(grant.slots[good:], grant.generations[good:]))

    async def _end_offering(self) -> None:
        """A pull that is cancelled while it asks for an offer: the other store may have made it already."""
        offering, self._offering = self._offering, None
        if offering is None:
            return
        if not offering.done() and not self._offering_waits:
            await asyncio.wait([offering], timeout=WITHDRAW_SECONDS)
        offering.cancel()
        with suppress(KVSieveError, asyncio.CancelledError):
            self._offer = await offering

    async def _renew(self, token: bytes) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(KVSieveError):  # the next read will tell
                request = pb.RenewRequest(token=token, lease_ms=OFFER_MS)
                await self._call("Renew", self._stub.Renew(request, timeout=RENEW_SECONDS))

    def _withdraw(self) -> Coroutine[Any, Any, None]:
        """Takes the offer from the pull at once; gives it back to the peer when it is awaited."""
        offer, self._offer = self._offer, pb.OfferResponse()
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        taken = 0 if self._is_fetch else min(self.plan.present - self._first, offer.blocks)

        async def withdraw(stub: Any) -> None:
            if offer.token:
                with suppress(KVSieveError):  # it runs out by itself
                    request = pb.WithdrawRequest(token=offer.token, taken=taken)
                    await self._call("Withdraw", stub.Withdraw(request, timeout=WITHDRAW_SECONDS))

        return withdraw(self._stub)

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise call_error(error, name, self.source) from None


def keys_of(request: pb.PullRequest) -> list[bytes]:
    """Raises InvalidRequestError for keys, parent, timeout_ms or wait_ms."""
    raw: bytes = request.keys
    count, rest = divmod(len(raw), KEY_BYTES)
    if rest or not 1 <= count <= MAX_BATCH:
        raise InvalidRequestError(
            f"keys: {len(raw)} bytes given, 1 to {MAX_BATCH} keys of {KEY_BYTES} bytes allowed"
        )
    if len(request.parent) not in (0, KEY_BYTES):
        raise InvalidRequestError(f"parent: {len(request.parent)} bytes given, 0 or {KEY_BYTES} allowed")
    if not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(f"timeout_ms: {request.timeout_ms} given, 1 to {MAX_TIMEOUT_MS} allowed")
    keys = [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
    if request.wait_ms > MAX_TIMEOUT_MS:
        raise InvalidRequestError(f"wait_ms: {request.wait_ms} given, 0 to {MAX_TIMEOUT_MS} allowed")
    if _NO_KEY in keys:
        raise InvalidRequestError(f"keys[{keys.index(_NO_KEY)}]: all zero, which stands for no block")
    return keys


def _sound(plane: DataPlane, offsets: U64Array, size: int, wanted: bytes) -> int:
    """How many blocks, from the first on, have the digests that they should have."""
    for i, offset in enumerate(offsets.tolist()):
        if plane.digest(offset, size) != wanted[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]:
            return i
    return len(offsets)
