"""Offers: blocks that this store lets another one read."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import InvalidRequestError, UnavailableError
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.protocol.limits import MAX_LEASE_MS
from kvsieve_store.server.core import Core, InnerSession

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Offer:
    """session: holds the lease on the blocks. ends: seconds, on the store's clock."""

    session: InnerSession
    ends: float


class Offers:
    """Runs in the event loop's thread. An offer is a lease and an export: blocks are neither evicted nor
    reused before the export is closed and nobody reads from it."""

    def __init__(self, core: Core, plane: DataPlane) -> None:
        self._core = core
        self._plane = plane
        self._offers: dict[bytes, _Offer] = {}
        self.blocks = 0
        """Offered so far; only grows."""

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, request: pb.OfferRequest) -> pb.OfferResponse:
        """Raises what kvsieve.v1.Peer.Offer says."""
        plane, core = self._plane, self._core
        if plane.description is None:
            raise UnavailableError("peer_listen: not set; this store serves no peers")
        if not 1 <= request.lease_ms <= MAX_LEASE_MS:
            raise InvalidRequestError(f"lease_ms: {request.lease_ms} given, 1 to {MAX_LEASE_MS} allowed")
        spec = core.state.spec_of(request.pool_id)
        session = core.open_inner_session(spec, "peer (offer)")
        try:
            match = core.state.match(session.session_id, request.keys, MAX_LEASE_MS, core.now())
            if not len(match.slots):
                core.end_inner_session(session)
                return pb.OfferResponse()
            layout = session.layout
            offsets = layout.slot_addresses(match.slots)
            token = plane.exports.open(offsets, layout.slot_bytes)
        except BaseException:
            core.end_inner_session(session)
            raise
        self._offers[token] = _Offer(session, core.now() + request.lease_ms / 1000)
        self.blocks += len(offsets)
        digests = b""
        try:
            if request.digests:
                # Counts as reading: the blocks stay until the thread is done with them.
                export = plane.exports.begin(token)
                future = asyncio.get_running_loop().run_in_executor(
                    plane.threads, plane.digests, offsets, layout.slot_bytes
                )
                future.add_done_callback(lambda _: plane.exports.end(export))
                digests = await future
        except BaseException:
            self.withdraw(token)
            raise
        return pb.OfferResponse(
            blocks=len(offsets),
            token=token,
            slot_bytes=layout.slot_bytes,
            description=plane.description.pack(),
            digests=digests,
        )

    def withdraw(self, token: bytes) -> None:
        """Takes an offer back; the lease goes once nobody reads any more. Does nothing when it is gone."""
        offer = self._offers.pop(token, None)
        if offer is not None:
            loop = asyncio.get_running_loop()

            def drained() -> None:
                with suppress(RuntimeError):  # the loop is closed: the store has ended
                    loop.call_soon_threadsafe(self._core.end_inner_session, offer.session)

            self._plane.exports.close(token, drained)

    def tick(self) -> None:
        """Takes back what has run out."""
        now = self._core.now()
        for token, offer in list(self._offers.items()):
            if now >= offer.ends:
                _log.info("an offer ran out before it was withdrawn")
                self.withdraw(token)
