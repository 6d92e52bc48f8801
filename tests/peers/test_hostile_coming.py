"""Peers that lie about blocks that are being written: it costs the pull, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.client import AdminClient
from kvsieve_store.peers.following import Promises
from tests.conftest import StoreProcess
from tests.peers.conftest import LAYERS, WAIT, Host, host
from tests.peers.liars import liar, refuses, same
from tests.peers.writing import Writer
from tests.protocol.client_stores import until

Pair = tuple[Host, Host]
COUNT = 4


@pytest.fixture
def transport() -> str:
    return "tcp"


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
        refuses(target, address, writer.keys, wait_ms=1_000)
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


def test_what_is_promised_takes_no_slot_before_a_byte_of_it_is_there(pair: Pair) -> None:
    source, target = pair
    writer = Writer(source.client, COUNT)
    target.client.wait_attached(WAIT)
    with ThreadPoolExecutor() as pool, AdminClient(target.store.endpoint) as admin:

        def taken() -> int:
            return admin.list_pools().pools[0].writing_slots

        pulled = pool.submit(target.pull, source.store.endpoint, writer.keys, wait_seconds=WAIT)
        until(lambda: source.metric("kvsieve_peer_offers"))
        time.sleep(0.3)
        assert taken() == 0
        writer.write([0])
        until(lambda: taken() == COUNT)
        writer.write(range(1, LAYERS))
        writer.seal()
        assert pulled.result(WAIT).present == COUNT
        assert taken() == 0
    target.settled()
    source.settled()


def test_a_source_that_does_not_deliver_keeps_its_part_of_the_slots_at_most(
    start_store: Callable[..., StoreProcess],
) -> None:
    flags = ("--peer-transports", "tcp")
    with host(start_store, *flags) as source, host(start_store, "--pool-size", "16MiB", *flags) as target:
        target.client.wait_attached(WAIT)
        room = target.client.attachment.slots
        writer = Writer(source.client, room)
        writer.write([0])
        with ThreadPoolExecutor() as pool, AdminClient(target.store.endpoint) as admin:
            halves = writer.keys[: room // 2], writer.keys[room // 2 :]
            pulls = [
                pool.submit(target.pull, source.store.endpoint, keys, wait_seconds=WAIT) for keys in halves
            ]
            until(lambda: admin.list_pools().pools[0].writing_slots == room // Promises.PART)
            time.sleep(0.3)
            assert admin.list_pools().pools[0].writing_slots == room // Promises.PART
            # All else is there for others; and nothing is lost for those who wait.
            assert target.client.reserve(room) == room - room // Promises.PART
            target.client.release(refs=target.client.take_credits(room))
            writer.write(range(1, LAYERS))
            writer.seal()
            assert sum(pull.result(WAIT).present for pull in pulls) == room
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
