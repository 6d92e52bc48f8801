"""Peers that lie about blocks that are being written: it costs the pull, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from tests.peers.conftest import LAYERS, WAIT, Host
from tests.peers.test_hostile_peers import OURS
from tests.peers.writing import Writer
from tests.protocol.client_stores import until

Pair = tuple[Host, Host]
COUNT = 4


@pytest.fixture
def transport() -> str:
    return "tcp"


class _Liar(peer_pb2_grpc.PeerServicer):
    """Says what `source` says, changed."""

    def __init__(self, source: Host, offer: Callable, follow: Callable) -> None:
        self.source, self.offer, self.follow = source, offer, follow
        self.follows = 0

    def Offer(self, request: pb.OfferRequest, context: grpc.ServicerContext) -> pb.OfferResponse:
        request.wait_ms = min(request.wait_ms, 100)
        answer = self.source.peer.Offer(request)
        self.offer(answer)
        return answer

    def Follow(self, request: pb.FollowRequest, context: grpc.ServicerContext) -> pb.FollowResponse:
        self.follows += 1
        request.wait_ms = min(request.wait_ms, 50)
        answer = self.source.peer.Follow(request, timeout=WAIT)
        self.follow(answer)
        return answer

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewResponse:
        return self.source.peer.Renew(request)

    def Withdraw(self, request: pb.WithdrawRequest, context: grpc.ServicerContext) -> pb.WithdrawResponse:
        return self.source.peer.Withdraw(request)


@contextmanager
def liar(source: Host, offer: Callable, follow: Callable) -> Iterator[tuple[str, _Liar]]:
    """Its address, and it."""
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = _Liar(source, offer, follow)
    peer_pb2_grpc.add_PeerServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address, servicer
    finally:
        server.stop(0)


def same(answer: object) -> None:
    """No lie."""


def layers(*numbers: int) -> Callable[[pb.FollowResponse], None]:
    def change(answer: pb.FollowResponse) -> None:
        answer.layers[:] = numbers

    return change


def digests(size: int) -> Callable[[pb.FollowResponse], None]:
    return lambda answer: setattr(answer, "digests", b"x" * size)


SEALED = LAYERS + 1
OFFERS: dict[str, Callable] = {
    "more than asked for": lambda offer: setattr(offer, "coming", COUNT + 1),
    "absurdly many": lambda offer: setattr(offer, "coming", 2**32 - 1),
    "coming and there": lambda offer: setattr(offer, "blocks", COUNT),
    "another token": lambda offer: setattr(offer, "token", bytes(16)),
    "another size": lambda offer: setattr(offer, "slot_bytes", 1),
}
FOLLOWS: dict[str, Callable] = {
    "layers that are not there": layers(*[LAYERS] * COUNT),
    "sealed, and is not": layers(*[SEALED] * COUNT),
    "more layers than there are": layers(*[SEALED + 1] * COUNT),
    "absurd layers": layers(*[2**32 - 1] * COUNT),
    "more blocks than it had": layers(*[1] * (COUNT + 1)),
    "digests of blocks that are not sealed": digests(32),
    "half a digest": digests(16),
    "more digests than blocks": digests(32 * (COUNT + 1)),
}


@pytest.mark.parametrize("lie", [*OFFERS, *FOLLOWS])
def test_a_lie_costs_the_pull_only(pair: Pair, lie: str) -> None:
    source, target = pair
    writer = Writer(source.client, COUNT)
    writer.write([0])
    target.client.wait_attached(WAIT)
    with liar(source, OFFERS.get(lie, same), FOLLOWS.get(lie, same)) as (address, _):
        call = target.start_pull(address, writer.keys, wait_ms=1_000)
        error = call.exception(2 * WAIT)
        assert call.result().present == 0 if error is None else call.code() not in OURS
        target.settled()
    assert target.holds(writer.keys) == 0
    writer.write(range(LAYERS))
    writer.seal()
    assert target.pull(source.store.endpoint, writer.keys).present == COUNT
    assert target.holds(writer.keys) == COUNT
    target.settled()
    source.settled()


def test_wrong_digests_seal_nothing(pair: Pair) -> None:
    source, target = pair
    writer = Writer(source.client, COUNT)
    target.client.wait_attached(WAIT)

    def forge(answer: pb.FollowResponse) -> None:
        answer.digests = bytes(len(answer.digests))

    with liar(source, same, forge) as (address, server), ThreadPoolExecutor() as pool:
        pulled = pool.submit(target.pull, address, writer.keys, wait_seconds=WAIT)
        writer.write(range(LAYERS))
        until(lambda: server.follows)
        writer.seal()
        # The blocks are there now, and are offered as such, with digests of their own.
        answer = pulled.result(WAIT)
    assert (answer.present, answer.damaged) == (COUNT, 1)
    assert target.holds(writer.keys) == COUNT
    target.settled()
    source.settled()


def test_blocks_that_come_no_more_again_and_again_are_given_up(pair: Pair) -> None:
    source, target = pair
    writer = Writer(source.client, COUNT)
    with liar(source, same, layers()) as (address, server):
        answer = target.pull(address, writer.keys, wait_seconds=1.0)
        assert (answer.present, "no more" in answer.reason) == (0, True)
        assert server.follows > 1
    target.settled()
    source.settled()
