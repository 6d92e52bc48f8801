"""Peers that lie: what a store offers, changed on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from tests.peers.conftest import WAIT, Host

Pair = tuple[Host, Host]
Change = Callable[[pb.OfferResponse], object]
ChangeFollow = Callable[[pb.FollowResponse], object]

OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""Codes that blame the store that pulls."""


def same(answer: object) -> None:
    """No lie."""


class Liar(peer_pb2_grpc.PeerServicer):
    """Says what `source` says, changed. offers, follows: calls so far. renewed: tokens, as they are."""

    def __init__(self, source: Host, change: Change, change_follow: ChangeFollow) -> None:
        self.source, self.change, self.change_follow = source, change, change_follow
        self.offers = self.follows = 0
        self.renewed: list[bytes] = []
        self.token = b""
        self.tokens: dict[bytes, bytes] = {}
        """As told -> as it is."""

    def Offer(self, request: pb.OfferRequest, context: object) -> pb.OfferResponse:
        self.offers += 1
        request.wait_ms = min(request.wait_ms, 100)
        offer = self.source.peer.Offer(request)
        self.source.peer.Withdraw(pb.WithdrawRequest(token=self.token))
        self.token = offer.token
        self.change(offer)
        self.tokens[offer.token] = self.token
        return offer

    def Follow(self, request: pb.FollowRequest, context: object) -> pb.FollowResponse:
        self.follows += 1
        request.token = self.tokens[request.token]
        request.wait_ms = min(request.wait_ms, 50)
        answer = self.source.peer.Follow(request, timeout=WAIT)
        self.change_follow(answer)
        return answer

    def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewResponse:
        self.renewed.append(self.tokens[request.token])
        return self.source.peer.Renew(pb.RenewRequest(token=self.renewed[-1], lease_ms=request.lease_ms))

    def Withdraw(self, request: pb.WithdrawRequest, context: object) -> pb.WithdrawResponse:
        return self.source.peer.Withdraw(pb.WithdrawRequest(token=self.tokens[request.token]))


@contextmanager
def liar(source: Host, offer: Change, follow: ChangeFollow = same) -> Iterator[tuple[str, Liar]]:
    """Its address, and it. offer, follow: change its answers to these calls."""
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = Liar(source, offer, follow)
    peer_pb2_grpc.add_PeerServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address, servicer
    finally:
        server.stop(0)


def lie_costs_the_pull_only(pair: Pair, change: Change) -> None:
    """Of ten blocks none is taken from a liar; from who tells the truth they come as ever."""
    source, target = pair
    keys = source.save(10)
    target.client.wait_attached(WAIT)
    with liar(source, change) as (address, _):
        refuses(target, address, keys)
    assert target.holds(keys) == 0
    assert target.pull(source.store.endpoint, keys).present == 10
    assert target.holds(keys) == 10
    target.settled()
    source.settled()


def refuses(target: Host, address: str, keys: list[bytes], wait_ms: int = 0) -> None:
    """A pull of the keys from there brings none, and does not blame its own store."""
    call = target.start_pull(address, keys, wait_ms=wait_ms)
    error = call.exception(2 * WAIT)
    assert call.result().present == 0 if error is None else call.code() not in OURS
    target.settled()
