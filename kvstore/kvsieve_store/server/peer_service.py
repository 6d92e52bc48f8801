"""kvsieve.v1.Peer: what other stores ask, and engines that want another store's blocks."""

from __future__ import annotations

from typing import Any

import grpc

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from kvsieve_store.errors import UnavailableError
from kvsieve_store.peers.peers import Peers
from kvsieve_store.server.core import Core

Context = grpc.aio.ServicerContext[Any, Any]


class PeerService(peer_pb2_grpc.PeerServicer):
    """Handlers raise errors of kvsieve_store.errors; the interceptor maps them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Offer(self, request: pb.OfferRequest, context: Context) -> pb.OfferResponse:
        host, _, _ = context.peer().rpartition(":")  # without the port: each pull has a connection of its own
        return await self._peers.offers.offer(request, host)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> pb.FollowResponse:
        if self._core.peers is None:
            raise UnavailableError("the store is not ready yet; try again")
        return await self._core.peers.offers.follow(request)  # also while the store drains, as Renew

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        if self._core.peers is None:
            raise UnavailableError("the store is not ready yet; try again")
        # Also while the store drains: it waits for the leases, and the pulls that have them go on.
        self._core.peers.offers.renew(request.token, request.lease_ms)
        return pb.RenewResponse()

    async def Withdraw(self, request: pb.WithdrawRequest, context: Context) -> pb.WithdrawResponse:
        if self._core.peers is not None:  # also while the store drains
            self._core.peers.offers.withdraw(request.token, request.taken)
        return pb.WithdrawResponse()

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullResponse:
        peers = self._peers
        if not request.source and peers.fetcher is not None:
            return await peers.fetcher.fetch(request)
        return await peers.puller.pull(request)

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        held = self._peers.holds.hold(request.session_id, request.keys, request.hold_ms)
        return pb.HoldResponse(held=held)

    @property
    def _peers(self) -> Peers:
        peers = self._core.peers
        if peers is None or (reason := self._core.why_not_ready()):
            raise UnavailableError(reason if peers else "the store is not ready yet; try again")
        return peers
