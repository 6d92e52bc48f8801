"""One pull: offers, reads, digests and seals, until all blocks are here or none comes any more."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
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
from kvsieve_store.peers.families import map_of_offer
from kvsieve_store.peers.following import Following, Promises
from kvsieve_store.peers.links import PeerLinks
from kvsieve_store.peers.plan import PullPlan
from kvsieve_store.peers.plane import DIGEST_BYTES, SHORT_BYTES, DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.protocol.layers import LayerOrder
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH
from kvsieve_store.protocol.slot_map import SlotMap
from kvsieve_store.server.core import Core, InnerSession
from kvsieve_store.state import Grant
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
"""Pause after an answer that brings nothing: a store that does not wait is not asked in a loop."""

ATTEMPTS = 4

_PEER_OPTIONS = (
    *(each for each in CHANNEL_OPTIONS if not each[0].startswith(("grpc.keepalive", "grpc.http2.ping"))),
    # A store that comes back is reached within about a second; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The time to connect, too. A wire that is cut, or a store that hangs, is noticed as soon as in a read.
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    # The former is for TCP; a peer that hangs, but whose kernel answers, is noticed by this one.
    ("grpc.http2.ping_timeout_ms", 2_500),
)

NO_KEY = bytes(KEY_BYTES)


@dataclass(eq=False, slots=True)
class Common:
    """What the pulls of a store have in common. claims: (source, pool id, key) -> the pull that brings the
    block; others of the same source wait for it. promises: blocks on their way. waits: times that a pull
    waited for blocks that the other store had not got; only grows."""

    core: Core
    plane: DataPlane
    links: PeerLinks
    claims: dict[tuple[str, bytes, bytes], Pull] = field(default_factory=dict)
    promises: Promises = field(default_factory=Promises)
    waits: int = 0


class Pull:
    """One pull, of chained keys from one store. Runs in the event loop's thread."""

    def __init__(
        self,
        common: Common,
        inner: InnerSession,
        target: str,
        keys: Sequence[bytes],
        request: pb.PullRequest,
        is_fetch: bool,
    ) -> None:
        self._common = common
        self._core, self._plane, self._links = common.core, common.plane, common.links
        self._inner = inner
        self._pool_id = inner.session.pool_id
        self.source = request.source
        self._wait_seconds = request.wait_ms / 1000
        self._is_fetch = is_fetch
        self._lease_id = 0
        self._target = target
        self._open_channel()
        self._keys = keys
        self._parents = [request.parent or NO_KEY, *keys]
        self._offer = pb.OfferResponse()
        self._renewing: asyncio.Task[None] | None = None
        self._offering: asyncio.Future[pb.OfferResponse] | None = None
        self._offering_waits = False
        self._first = 0
        self._description: Description | None = None
        self._order = LayerOrder.of(inner.session.pool.spec)
        self._backoff = Backoff(random.Random())
        slot_bytes = inner.layout.slot_bytes
        self._map = SlotMap.whole(slot_bytes)
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
                    await {"offer": self._ask, "read": self._read, "follow": self._follow}[plan.step]()
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
        claims, missing = self._common.claims, self._keys[self.plan.present :]
        owner = claims.setdefault((self.source, self._pool_id, missing[0]), self)
        if owner is not self:
            return owner.moved
        for key in missing:
            claims.setdefault((self.source, self._pool_id, key), self)
        return None

    def _unclaim(self) -> None:
        claims = self._common.claims
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

    def _patience_for_blocks(self) -> float:
        """Seconds that a new block is waited for from now on."""
        return max(self._moved_at + self._wait_seconds - asyncio.get_running_loop().time(), 0.0)

    async def _ask(self) -> None:
        await self._withdraw()
        left = self._patience_for_blocks()
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
            pool=self._inner.session.pool.spec.to_proto(),
            coming=wait > 0 and self._order is not None and self._room_for_promises() > 0,
        )
        slot_bytes = self._inner.layout.slot_bytes
        hashing = slot_bytes * (len(self._keys) - self._first) * DIGEST_SECONDS
        patience = min(wait + ANSWER_SECONDS + hashing, self._patience())
        call = self._call("Offer", self._stub.Offer(request, timeout=patience))
        self._offering = asyncio.ensure_future(call)
        self._offering_waits = wait > 0
        offer = self._offer = await asyncio.shield(self._offering)
        self._offering = None
        if offer.blocks or offer.coming:
            self._map = map_of_offer(offer, self._inner.session.pool.spec)
            if not (
                offer.blocks + offer.coming <= len(self._keys) - self._first
                and ((request.coming and not offer.HasField("pool")) or not offer.coming)
                and offer.slot_bytes == self._map.source_bytes
                and len(offer.digests) == offer.blocks * DIGEST_BYTES
                and len(offer.token) == 16
            ):
                raise InvalidRequestError(
                    f"offer: {offer.blocks} blocks of {offer.slot_bytes} bytes and {offer.coming} coming, "
                    f"{len(offer.digests)} bytes of digests; {self._map.source_bytes} bytes a block expected"
                )
            self._description = Description.of(offer.description)
            self._renewing = asyncio.ensure_future(self._renew(offer.token))
        self.plan.offered(offer.blocks, offer.coming, more_may_come=left > 0)
        if not offer.blocks + offer.coming and left > 0:
            self._common.waits += 1
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
            slots = self._inner.layout.slot_addresses(grant.slots)
            ranges, places = self._map.ranges(at, count)
            into = np.repeat(slots, len(ranges) // count) + places
            assert self._description is not None
            try:
                await self._links.read(
                    self.source, self._description, self._offer.token, ranges, into, READ_SECONDS
                )
            except NotFoundError as error:  # the offer has run out: it is asked for anew
                raise UnavailableError(str(error)) from None
            wanted = self._offer.digests[at * DIGEST_BYTES : (at + count) * DIGEST_BYTES]
            check = partial(_sound, self._plane, slots, self._map, wanted)
            good = check() if count * size <= SHORT_BYTES else await in_thread(self._plane.hashers, check)
        except BaseException:
            core.give_back_inner(self._inner, grant)
            raise
        self._landed(grant, good)

    async def _follow(self) -> None:
        """Blocks that are still being written over there: layers as they come, sealed once they are."""
        plan, at = self.plan, self.plan.present - self._first
        assert self._description is not None
        assert self._order is not None
        following = Following(
            self._links,
            self._plane,
            self._order,
            (self.source, self._pool_id),
            (self._description, self._offer.token),
            (at, at - self._offer.blocks),
            min(plan.coming, MAX_BATCH),
        )
        self._common.promises.begin(following)
        try:
            while following.left and plan.step == "follow":
                await self._follow_on(following)
        except NotFoundError as error:
            raise UnavailableError(str(error)) from None
        finally:
            self._common.promises.end(following)
            self._links.counters_of(self.source).early += following.early
            self._core.give_back_inner(self._inner, following.rest)

    def _room_for_promises(self) -> int:
        """Slots that may be taken for blocks that are still being written."""
        slots = self._inner.session.pool.quota * self._inner.layout.slots_per_extent
        return self._common.promises.room(self.source, self._pool_id, slots)

    def _take_slots(self, following: Following, reply: pb.FollowResponse) -> int:
        """For blocks of which something is there to be read now; as many as can be had."""
        wanted = min(following.left, self._room_for_promises())
        grant = self._core.reserve_inner(self._inner, wanted) if wanted else Grant.none()
        following.take(grant, self._inner.layout.slot_addresses(grant.slots), reply)
        if wanted and not len(grant):
            self.plan.stop("slots: none is free, and none can be freed")
        elif not wanted:
            self.plan.came_no_more()
        return len(grant)

    async def _follow_on(self, following: Following) -> None:
        plan, count = self.plan, following.known
        wait = min(self._patience_for_blocks(), WAIT_SLICE_SECONDS)
        call = self._stub.Follow(following.request(wait), timeout=wait + ANSWER_SECONDS)
        reply = await self._call("Follow", call)
        said = len(reply.layers)
        if following.is_news(reply):
            if not following.has_slots and not self._take_slots(following, reply):
                return
            whole = await following.read(reply, BATCH_BYTES, READ_SECONDS)
            if whole:
                good = following.sound(reply.digests)
                self._landed(following.over(whole), good)
        else:
            await asyncio.sleep(EMPTY_SECONDS)
        if said < count or not wait:
            plan.came_no_more()

    def _landed(self, grant: Grant, good: int) -> None:
        """The next blocks are in these slots: the first `good` of them as they should be."""
        self._seal(grant, good)
        self.plan.landed(len(grant), good)
        counters = self._links.counters_of(self.source)
        counters.pulled += good
        counters.damaged += good < len(grant)
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
        offered = offer.blocks + offer.coming
        taken = 0 if self._is_fetch else min(self.plan.present - self._first, offered)

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


def _sound(plane: DataPlane, slots: U64Array, slot_map: SlotMap, wanted: bytes) -> int:
    """How many blocks, from the first on, have the digests that they should have."""
    at, lengths = slot_map.target_runs()
    for i, slot in enumerate(slots.tolist()):
        if plane.digest(slot, at, lengths) != wanted[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]:
            return i
    return len(slots)
