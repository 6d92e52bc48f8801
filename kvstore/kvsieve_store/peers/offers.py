"""Offers: blocks that this store lets another one read."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import InvalidRequestError, NotFoundError, UnavailableError
from kvsieve_store.peers.coming import MAX_COMING, MAX_COMING_OFFERS, Coming
from kvsieve_store.peers.families import offered_pool
from kvsieve_store.peers.holds import Holds
from kvsieve_store.peers.plane import SHORT_BYTES, DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.peers.waits import BlockWaits
from kvsieve_store.protocol.layers import LayerOrder
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_LEASE_MS, MAX_MATCH_KEYS
from kvsieve_store.protocol.slot_map import SlotMap
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.server.core import Core, InnerSession
from kvsieve_store.state.arrays import as_keys
from kvsieve_store.transport.exports import Growing
from kvsieve_store.transport.memory import U64Array

_log = logging.getLogger(__name__)

MAX_WAIT_MS = 60_000


@dataclass(eq=False, slots=True)
class _Offer:
    """session: holds the lease on the blocks, until `leased`. ends: when the offer does. Both on the store's
    clock, seconds. keys: end to end. coming: the last of them, if they are still being written."""

    session: InnerSession
    leased: float
    ends: float
    keys: bytes
    coming: Coming | None = None


class Offers:
    """Runs in the event loop's thread. An offer is a lease and an export: blocks are neither evicted nor
    reused before the export is closed and nobody reads from it."""

    def __init__(self, core: Core, plane: DataPlane, holds: Holds) -> None:
        self._core = core
        self._plane = plane
        self._holds = holds
        self.waits = BlockWaits()
        self._offers: dict[bytes, _Offer] = {}
        self.blocks = 0
        """Offered so far; only grows."""

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, request: pb.OfferRequest, peer: str) -> pb.OfferResponse:
        """peer: the host that asks. Raises what kvsieve.v1.Peer.Offer says."""
        plane, core = self._plane, self._core
        if plane.description is None:
            raise UnavailableError("peer_listen: not set; this store serves no peers")
        _check_lease(request.lease_ms)
        if request.wait_ms > MAX_WAIT_MS:
            raise InvalidRequestError(f"wait_ms: {request.wait_ms} given, 0 to {MAX_WAIT_MS} allowed")
        as_keys("keys", request.keys, 1, MAX_MATCH_KEYS)  # before it waits for one of them
        spec, slot_map = offered_pool(core.state, request)
        pool_id = spec.pool_id()
        if request.wait_ms:
            await self._wait(request, spec, peer)
        session = core.open_inner_session(spec, "peer (offer)")
        try:
            leased = core.now() + MAX_LEASE_MS / 1000
            match, coming = core.state.match_coming(
                session.session_id, request.keys, MAX_LEASE_MS, self._most_coming(request, spec), core.now()
            )
            sealed, writing = len(match.slots), len(coming)
            if not sealed + writing:
                core.end_inner_session(session)
                return pb.OfferResponse()
            layout, order = session.layout, LayerOrder.of(spec)
            offsets = layout.slot_addresses(np.append(match.slots, coming.slots))
            growing = None
            if writing and order is not None:
                growing = Growing(sealed, order, np.zeros(writing, np.int64))
            token = plane.exports.open(offsets, layout.slot_bytes, growing)
        except BaseException:
            core.end_inner_session(session)
            raise
        offered = request.keys[: len(offsets) * KEY_BYTES]
        offer = self._offers[token] = _Offer(session, leased, leased, offered)
        self.blocks += len(offsets)
        try:
            if growing is not None:
                offer.coming = Coming(
                    core, plane, session, token, offered[sealed * KEY_BYTES :], coming.slots, growing
                )
            digests = await self._digests(token, offsets[:sealed], slot_map) if request.digests else b""
        except BaseException:
            self.withdraw(token)
            raise
        offer.ends = min(core.now() + request.lease_ms / 1000, leased)
        return pb.OfferResponse(
            blocks=sealed,
            token=token,
            slot_bytes=layout.slot_bytes,
            description=plane.description.pack(),
            digests=digests,
            pool=spec.to_proto() if pool_id != request.pool_id else None,
            coming=writing,
        )

    def _most_coming(self, request: pb.OfferRequest, spec: PoolSpec) -> int:
        """None of a pool with another TP size than that which asks has."""
        if not request.coming or spec.pool_id() != request.pool_id or LayerOrder.of(spec) is None:
            return 0
        with_some = sum(offer.coming is not None for offer in self._offers.values())
        return MAX_COMING if with_some < MAX_COMING_OFFERS else 0

    async def follow(self, request: pb.FollowRequest) -> pb.FollowResponse:
        """Raises what kvsieve.v1.Peer.Follow says."""
        coming = self._offer(request.token).coming
        return await coming.follow(request) if coming is not None else pb.FollowResponse()

    def came(self, pool_id: bytes, keys: bytes) -> None:
        """These blocks are there, or are being written: wakes who waits for one of them. keys: 32 bytes each,
        end to end."""
        self.waits.came(pool_id, keys)
        for offer in self._offers.values():
            if offer.coming is not None and offer.session.session.pool_id == pool_id:
                offer.coming.touch()

    async def _digests(self, token: bytes, offsets: U64Array, slot_map: SlotMap) -> bytes:
        plane, at, lengths = self._plane, slot_map.source, slot_map.length
        if len(offsets) * slot_map.target_bytes <= SHORT_BYTES:
            return plane.digests(offsets, at, lengths)
        # Counts as reading: the blocks stay until the thread is done with them.
        export = plane.exports.begin(token)
        try:
            return await in_thread(plane.hashers, partial(plane.digests, offsets, at, lengths))
        finally:
            plane.exports.end(export)

    async def _wait(self, request: pb.OfferRequest, spec: PoolSpec, peer: str) -> None:
        """Until the first key is sealed, or being written for who takes that, or the time is over."""
        pool_id, first, state = spec.pool_id(), request.keys[:KEY_BYTES], self._core.state

        def has_first() -> bool:
            is_coming = self._most_coming(request, spec) > 0 and state.is_coming(pool_id, first)
            return is_coming or state.has(pool_id, first)

        with suppress(TimeoutError):
            async with asyncio.timeout(request.wait_ms / 1000):
                while not has_first():
                    came = asyncio.Event()
                    wait = self.waits.begin(pool_id, first, peer, came.set)
                    try:
                        await came.wait()
                    finally:
                        self.waits.end(wait)
                    if self._core.why_not_ready():
                        return

    def renew(self, token: bytes, lease_ms: int) -> None:
        """The offer lasts so much longer from now on, but no longer than the blocks are leased. Raises what
        kvsieve.v1.Peer.Renew says."""
        _check_lease(lease_ms)
        offer = self._offer(token)
        offer.ends = min(self._core.now() + lease_ms / 1000, offer.leased)

    def _offer(self, token: bytes) -> _Offer:
        """Raises NotFoundError."""
        offer = self._offers.get(token)
        if offer is None:
            raise NotFoundError("token: no such offer; it has run out, or was withdrawn")
        return offer

    def withdraw(self, token: bytes, taken: int = 0) -> None:
        """Takes an offer back; the lease goes once nobody reads any more. Does nothing when it is gone.

        taken: how many of its blocks the other store has.
        """
        offer = self._offers.pop(token, None)
        if offer is not None:
            if offer.coming is not None:
                offer.coming.close()
            pool_id, keys = offer.session.session.pool_id, offer.keys[: taken * KEY_BYTES]
            self._core.state.taken(pool_id, keys)
            self._holds.taken(pool_id, keys)
            loop = asyncio.get_running_loop()

            def drained() -> None:
                with suppress(RuntimeError):  # the loop is closed: the store has ended
                    loop.call_soon_threadsafe(self._core.end_inner_session, offer.session)

            self._plane.exports.close(token, drained)

    def tick(self) -> None:
        """Takes back what has run out. Nobody waits for a store that drains."""
        now = self._core.now()
        if self._core.why_not_ready():
            self.waits.wake_all()
        for token, offer in list(self._offers.items()):
            if now >= offer.ends:
                _log.info("an offer ran out before it was withdrawn")
                self.withdraw(token)


def _check_lease(lease_ms: int) -> None:
    if not 1 <= lease_ms <= MAX_LEASE_MS:
        raise InvalidRequestError(f"lease_ms: {lease_ms} given, 1 to {MAX_LEASE_MS} allowed")
