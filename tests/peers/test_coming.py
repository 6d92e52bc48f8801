"""Blocks that are read while they are still being written, with writers that go on, stop, lie and die."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.client import Pulled
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.peers.coming import MAX_COMING, MAX_COMING_OFFERS
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.ucx.binding import why_missing
from tests.conftest import StoreProcess
from tests.peers.conftest import BLOCK, LAYERS, SPEC, WAIT, Host, content, host
from tests.peers.writing import LAYER, Writer, write_and_wait
from tests.protocol.client_stores import chain, entries, until

Pair = tuple[Host, Host]
COUNT = 8


@pytest.fixture(autouse=True)
def _ucx(transport: str) -> None:
    if transport == "ucx" and why_missing():
        pytest.skip(str(why_missing()))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def read(host: Host) -> float:
    return host.metric("kvsieve_peer_read_bytes_total")


def start(pool: ThreadPoolExecutor, pair: Pair, keys: list[bytes], wait: float = WAIT) -> Future[Pulled]:
    source, target = pair
    target.client.wait_attached(WAIT)
    return pool.submit(target.pull, source.store.endpoint, keys, wait_seconds=wait)


def complete(pair: Pair, pulled: Future[Pulled], keys: list[bytes]) -> Pulled:
    """All is there as it should be, and nothing is left."""
    source, target = pair
    answer = pulled.result(2 * WAIT)
    assert (answer.present, answer.reason) == (len(keys), "")
    assert target.holds(keys) == len(keys)
    source.settled()
    target.settled()
    return answer


def test_layers_are_there_before_the_last_one_is_written(pair: Pair, pool: ThreadPoolExecutor) -> None:
    source, target = pair
    writer = Writer(source.client, COUNT)
    pulled = start(pool, pair, writer.keys)
    for layer in range(LAYERS - 1):
        writer.write([layer])
        until(lambda n=layer + 1: read(target) == COUNT * n * LAYER)
    assert not target.holds(writer.keys)
    assert not pulled.done()
    writer.write([LAYERS - 1])
    writer.seal()
    answer = complete(pair, pulled, writer.keys)
    assert (answer.pulled, answer.damaged) == (COUNT, 0)
    assert read(target) == COUNT * BLOCK
    assert target.metric("kvsieve_peer_early_bytes_total") >= COUNT * (LAYERS - 1) * LAYER


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
class TestOnce:
    """What does not depend on the transport."""

    def test_sealed_blocks_come_first_and_steps_one_after_another(
        self, pair: Pair, pool: ThreadPoolExecutor
    ) -> None:
        source, target = pair
        source.save(COUNT)
        pulled = start(pool, pair, chain(3 * COUNT))
        until(lambda: target.metric("kvsieve_peer_pulled_blocks_total") == COUNT)
        for step in (1, 2):
            writer = Writer(source.client, COUNT, start=step * COUNT)
            writer.write(range(2))
            until(lambda n=step: read(target) == n * COUNT * BLOCK + COUNT * 2 * LAYER)
            writer.write(range(2, LAYERS))
            writer.seal()
        assert complete(pair, pulled, chain(3 * COUNT)).pulled == 3 * COUNT
        assert read(target) == 3 * COUNT * BLOCK

    def test_a_pull_that_does_not_wait_takes_what_is_sealed(self, pair: Pair) -> None:
        source, target = pair
        keys = source.save(2)
        writer = Writer(source.client, COUNT, start=2)
        writer.write(range(LAYERS))
        answer = target.pull(source.store.endpoint, keys + writer.keys)
        assert (answer.present, "no more" in answer.reason) == (2, True)

    def test_a_writer_that_gives_up_leaves_nothing(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        pulled = start(pool, pair, writer.keys)
        writer.write(range(2), wrong=1)
        until(lambda: read(target) == COUNT * 2 * LAYER)
        writer.give_up()
        until(lambda: source.metric("kvsieve_peer_waiting_offers"))
        assert not target.holds(writer.keys)
        assert source.save(COUNT) == writer.keys
        assert complete(pair, pulled, writer.keys).damaged == 0

    def test_a_writer_that_is_killed_leaves_nothing(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        source, target = pair
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        engine = spawn.Process(target=write_and_wait, args=(source.store.endpoint, COUNT, range(2), there))
        engine.start()
        assert here.poll(WAIT)
        pulled = start(pool, pair, chain(COUNT))
        until(lambda: read(target) == COUNT * 2 * LAYER)
        engine.kill()
        engine.join()
        until(lambda: source.metric("kvsieve_peer_waiting_offers"))
        assert not target.holds(chain(COUNT))
        source.save(COUNT)
        complete(pair, pulled, chain(COUNT))

    def test_the_source_is_killed_half_way(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        pulled = start(pool, pair, writer.keys, wait=2.0)
        writer.write(range(2))
        until(lambda: read(target) == COUNT * 2 * LAYER)
        source.store.kill()
        assert pulled.exception(WAIT) is not None or pulled.result().present == 0
        target.settled()
        assert not target.holds(writer.keys)
        source.store.start()
        assert target.pull(source.store.endpoint, source.save(COUNT)).present == COUNT
        assert target.holds(writer.keys) == COUNT

    def test_the_target_is_killed_half_way(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        pulled = start(pool, pair, writer.keys)
        writer.write(range(2))
        until(lambda: read(target) == COUNT * 2 * LAYER)
        target.store.kill()
        assert pulled.exception(WAIT) is not None
        writer.write(range(2, LAYERS))
        writer.seal()
        target.store.start()
        target.client.wait_attached(WAIT)
        assert target.pull(source.store.endpoint, writer.keys).present == COUNT
        assert target.holds(writer.keys) == COUNT
        source.settled()

    def test_a_caller_that_gives_up_half_way_leaves_nothing(self, pair: Pair) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        for n in range(1, LAYERS):
            writer.write([n - 1])
            call = target.start_pull(source.store.endpoint, writer.keys, wait_ms=60_000)
            until(lambda n=n: read(target) >= COUNT * LAYER * n * (n + 1) / 2)
            call.cancel()
            target.settled()
        writer.write([LAYERS - 1])
        writer.seal()
        assert target.pull(source.store.endpoint, writer.keys).present == COUNT
        source.settled()

    def test_bytes_that_change_after_they_were_said_to_be_there_are_not_taken(
        self, pair: Pair, pool: ThreadPoolExecutor
    ) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        pulled = start(pool, pair, writer.keys)
        writer.write([0], wrong=1)
        until(lambda: read(target) == COUNT * LAYER)
        writer.write(range(LAYERS))
        writer.seal()
        answer = complete(pair, pulled, writer.keys)
        assert (answer.pulled, answer.damaged) == (COUNT, 1)

    def test_words_that_say_too_much_make_no_block(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        source, target = pair
        writer = Writer(source.client, COUNT)
        for ref in writer.refs:
            writer.arena.slot(ref.slot)[:] = 0xAA
            writer.arena.set_layers_done(ref.slot, 0, 2**16 - 1)
        pulled = start(pool, pair, writer.keys)
        until(lambda: read(target) == COUNT * BLOCK)
        assert not target.holds(writer.keys)
        writer.write(range(LAYERS))
        writer.seal()
        assert complete(pair, pulled, writer.keys).damaged == 1

    def test_only_complete_layers_can_be_read(self, pair: Pair) -> None:
        source, _ = pair
        writer = Writer(source.client, 2)
        writer.write([0])
        offer = source.peer.Offer(offer_of(writer.keys))
        assert (offer.blocks, offer.coming) == (0, 2)
        memory = Memory([np.zeros(BLOCK, np.uint8)])
        deadline = time.monotonic() + WAIT
        description = Description.of(offer.description)

        def get(block: int, at: int, size: int) -> np.ndarray:
            ranges = np.array([[block, at, size]], np.uint64)
            link.read(offer.token, ranges, np.zeros(1, np.uint64), deadline)
            return np.frombuffer(memory.views[0], np.uint8)[:size]

        with connect(description, offer.token, memory, deadline, transports=["tcp"]) as link:
            assert (get(1, 0, LAYER) == content(1)[:LAYER]).all()
            for at, size in [(0, LAYER + 1), (LAYER, 1), (BLOCK - 1, 1), (0, BLOCK)]:
                with pytest.raises(InvalidRequestError, match=r"ranges\[0\].*still being written"):
                    get(1, at, size)
            writer.write([1])
            assert list(source.peer.Follow(follow(offer, seen=2)).layers) == [2, 2]
            assert (get(0, LAYER, LAYER) == content(0)[LAYER : 2 * LAYER]).all()
            writer.write(range(2, LAYERS))
            writer.seal()
            reply = source.peer.Follow(follow(offer, seen=4))
            assert list(reply.layers) == [LAYERS + 1] * 2
            assert (get(1, 0, BLOCK) == content(1)).all()
        source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))
        source.settled()

    def test_who_does_not_take_them_waits_for_the_seal(self, pair: Pair) -> None:
        source, _ = pair
        source.client.wait_attached(WAIT)
        keys = chain(COUNT)
        plain = source.peer.Offer.future(offer_of(keys, coming=False, wait_ms=60_000))
        early = source.peer.Offer.future(offer_of(keys, wait_ms=60_000))
        until(lambda: source.metric("kvsieve_peer_waiting_offers") == 2)
        writer = Writer(source.client, COUNT)
        assert early.result(WAIT).coming == COUNT
        assert not plain.done()
        writer.write(range(LAYERS))
        writer.seal()
        assert (plain.result(WAIT).blocks, plain.result().coming) == (COUNT, 0)
        for offer in (early, plain):
            source.peer.Withdraw(pb.WithdrawRequest(token=offer.result().token))
        source.settled()

    def test_offers_have_their_part_of_coming_blocks(self, pair: Pair) -> None:
        source, _ = pair
        writer = Writer(source.client, MAX_COMING + 1)
        offers = [source.peer.Offer(offer_of(writer.keys)) for _ in range(MAX_COMING_OFFERS + 1)]
        assert [offer.coming for offer in offers] == [MAX_COMING] * MAX_COMING_OFFERS + [0]
        writer.seal()
        assert source.peer.Offer(offer_of(writer.keys)).blocks == MAX_COMING + 1

    @pytest.mark.parametrize(
        ("fields", "code", "text"),
        [
            ({"token": bytes(16)}, "NOT_FOUND", "token"),
            ({"step": 0}, "INVALID_ARGUMENT", "step"),
            ({"wait_ms": 60_001}, "INVALID_ARGUMENT", "wait_ms"),
        ],
    )
    def test_bad_follows(self, pair: Pair, fields: dict[str, object], code: str, text: str) -> None:
        source, _ = pair
        writer = Writer(source.client, 2)
        request = follow(source.peer.Offer(offer_of(writer.keys)), wait_ms=0)
        for name, value in fields.items():
            setattr(request, name, value)
        with pytest.raises(grpc.RpcError) as caught:
            source.peer.Follow(request)
        assert (caught.value.code().name, text in caught.value.details()) == (code, True)

    def test_one_call_follows_an_offer_at_a_time_and_absurd_numbers_mean_nothing(self, pair: Pair) -> None:
        source, _ = pair
        writer = Writer(source.client, 2)
        offer = source.peer.Offer(offer_of(writer.keys))
        absurd = dict.fromkeys(("done", "seen", "step", "known"), 2**32 - 1)
        reply = source.peer.Follow(follow(offer, wait_ms=0, **absurd))
        assert (list(reply.layers), reply.digests) == ([], b"")
        waiting = source.peer.Follow.future(follow(offer))

        def refused() -> bool:
            try:
                source.peer.Follow(follow(offer, wait_ms=0))
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

        until(refused)
        source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))
        assert list(waiting.result(WAIT).layers) == []
        source.settled()

    def test_a_slot_is_given_to_nobody_while_a_peer_may_read_it(
        self, start_store: Callable[..., StoreProcess], pair: Pair
    ) -> None:
        source, _ = pair
        writer = Writer(source.client, COUNT)
        offer = source.peer.Offer(offer_of(writer.keys))
        writer.give_up()
        slots = {ref.slot for ref in writer.refs}
        assert not slots & self.all_slots(source)
        source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))
        until(lambda: slots <= self.all_slots(source))

    def all_slots(self, host: Host) -> set[int]:
        """Slots that an engine can get that takes all there are; they are given back."""
        host.client.reserve(4096)
        refs = host.client.take_credits(1 << 20)
        host.client.release(refs=refs)
        return {ref.slot for ref in refs}


def offer_of(keys: list[bytes], coming: bool = True, wait_ms: int = 0) -> pb.OfferRequest:
    return pb.OfferRequest(
        pool_id=SPEC.pool_id(), keys=b"".join(keys), lease_ms=60_000, coming=coming, wait_ms=wait_ms
    )


def follow(offer: pb.OfferResponse, **fields: int) -> pb.FollowRequest:
    values = {"step": 1, "wait_ms": 60_000, "known": offer.coming} | fields
    return pb.FollowRequest(token=offer.token, **values)


def test_announced_blocks_of_a_full_store_wait_for_a_pull_that_lags(
    start_store: Callable[..., StoreProcess],
) -> None:
    """Everything else was used lately, and the writer goes on until nothing is left for it."""
    flags = ("--peer-transports", "tcp")
    with host(start_store, "--pool-size", "8MiB", *flags) as source, host(start_store, *flags) as target:
        writer = Writer(source.client, COUNT, hold_seconds=WAIT)
        writer.write(range(LAYERS))
        writer.seal()
        assert source.metric("kvsieve_held_blocks") == COUNT
        for start in range(100, 200, 4):
            source.client.reserve(4)
            refs = source.client.take_credits(4)
            source.client.seal(entries(chain(4, start)[: len(refs)], refs))
            source.client.release(source.client.match(chain(4, start)).lease_ids)
        assert source.holds(writer.keys) == COUNT
        assert target.pull(source.store.endpoint, writer.keys).present == COUNT
        until(lambda: not source.metric("kvsieve_held_blocks"))
        source.settled()
        later = Writer(source.client, COUNT, start=COUNT, hold_seconds=WAIT)
        later.write(range(LAYERS))
        later.seal()
        assert source.client.hold(writer.keys + later.keys, seconds=0.5) == 2 * COUNT
        assert not source.metric("kvsieve_held_blocks")
        source.settled()  # once that hold is over
