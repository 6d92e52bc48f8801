"""Pulls between engines of differing TP sizes: each rank finds its heads, whatever the other side does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.client import ArenaMap, StoreClient
from kvsieve_store.errors import UnavailableError
from kvsieve_store.protocol.limits import MAX_LEASE_MS
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.transport.ucx.binding import why_missing
from tests.conftest import StoreProcess
from tests.peers.conftest import WAIT, Host
from tests.peers.liars import Change, lie_costs_the_pull_only
from tests.protocol.client_stores import chain, entries
from tests.unit.head_shards import Model, slot_of, spec_of

COUNT = 70
MODEL = [Model("main", 4, 1, (4096, 8192)), Model("indexer", 0, 0, (300, 5000))]

Start = Callable[..., StoreProcess]


class Ranks(Host):
    """A store, and an engine of this TP size on it."""

    def __init__(self, store: StoreProcess, tp: int, spec: PoolSpec | None = None) -> None:
        self.tp = tp
        self.spec = spec or spec_of(MODEL, tp)
        client = StoreClient(store.endpoint, self.spec, engine_id="engine", credit_target=0)
        client.start()
        super().__init__(store, client)

    def save(self, count: int, start: int = 0) -> list[bytes]:
        keys = chain(count, start)
        attachment = self.client.wait_attached(WAIT)
        self.client.reserve(count)
        refs = self.client.take_credits(count)
        with ArenaMap(attachment) as arena:
            for n, ref in enumerate(refs, start):
                arena.slot(ref.slot)[:] = slot_of(MODEL, self.tp, fill=n % 251, block=n)
        self.client.seal(entries(keys, refs))
        return keys

    def holds(self, keys: Sequence[bytes], start: int = 0) -> int:
        match = self.client.match(keys)
        payload = slot_of(MODEL, self.tp, fill=1) == slot_of(MODEL, self.tp, fill=2)
        with ArenaMap(self.client.wait_attached(WAIT)) as arena:
            for n, ref in enumerate(match.refs, start):
                expected = slot_of(MODEL, self.tp, block=n)
                assert (arena.slot(ref.slot)[payload] == expected[payload]).all(), n
        self.client.release(match.lease_ids)
        return len(match.refs)


@contextmanager
def ranks(start: Start, tp: int, *flags: str, spec: PoolSpec | None = None) -> Iterator[Ranks]:
    store = start("--peer-listen", "127.0.0.1:0", "--extent-size", "4MiB", *flags)
    it = Ranks(store, tp, spec)
    try:
        yield it
    finally:
        it.close()


@pytest.mark.parametrize(
    ("transport", "source_tp", "target_tp"),
    [("shm", 2, 4), ("ucx", 2, 4), *(("tcp", *sizes) for sizes in [(2, 4), (4, 2), (1, 2), (8, 4), (2, 16)])],
)
def test_each_rank_finds_its_heads(
    start_store: Start, transport: str, source_tp: int, target_tp: int
) -> None:
    if transport == "ucx" and why_missing():
        pytest.skip(str(why_missing()))
    flags = ("--peer-transports", transport)
    with ranks(start_store, source_tp, *flags) as source, ranks(start_store, target_tp, *flags) as target:
        keys = source.save(COUNT)
        answer = target.pull(source.store.endpoint, keys[:30])
        assert (answer.present, answer.pulled, answer.damaged, answer.reason) == (30, 30, 0, "")
        answer = target.pull(source.store.endpoint, keys)
        assert (answer.present, answer.pulled, answer.damaged, answer.reason) == (COUNT, COUNT - 30, 0, "")
        assert target.holds(keys) == COUNT
        payload = sum(sum(plane.layer_bytes) * plane.shards for plane in target.spec.planes)
        assert target.metric("kvsieve_peer_read_bytes_total") == COUNT * payload
        # What was pulled can be pulled on, and back.
        with ranks(start_store, source_tp, *flags) as third:
            assert third.pull(target.store.endpoint, keys).present == COUNT
            assert third.holds(keys) == COUNT
        source.settled()
        target.settled()


@pytest.fixture
def pair(start_store: Start) -> Iterator[tuple[Ranks, Ranks]]:
    """With 2 ranks and 4."""
    flags = ("--peer-transports", "tcp")
    with ranks(start_store, 2, *flags) as source, ranks(start_store, 4, *flags) as target:
        yield source, target


Pair = tuple[Ranks, Ranks]


def test_blocks_are_waited_for_while_they_are_computed(pair: Pair) -> None:
    source, target = pair
    source.client.wait_attached(WAIT)
    keys = chain(COUNT)
    call = target.start_pull(source.store.endpoint, keys, wait_ms=60_000)
    end = time.monotonic() + WAIT
    while not source.metric("kvsieve_peer_waiting_offers"):
        assert time.monotonic() < end
        time.sleep(0.01)
    source.save(40)
    source.save(COUNT - 40, start=40)
    assert call.result(WAIT).present == COUNT
    assert target.holds(keys) == COUNT
    source.settled()
    target.settled()


def test_a_hold_ends_once_its_blocks_are_taken(pair: Pair) -> None:
    source, target = pair
    keys = source.save(COUNT)
    assert source.client.hold(keys, seconds=MAX_LEASE_MS / 1000) == COUNT
    assert source.metric("kvsieve_peer_holds") == 1
    assert target.pull(source.store.endpoint, keys).present == COUNT
    source.settled()
    assert source.metric("kvsieve_peer_holds") == 0


def changed(tp: int, **fields: Any) -> PoolSpec:
    return replace(spec_of(MODEL, tp), **fields)


UNKNOWN = replace(spec_of(MODEL, 4).planes[0], heads=0, head_runs=0)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (changed(4, block_tokens=32), "block_tokens: 32 (this engine) != 16 (the pool)"),
        (changed(4, hash_seed="7"), "hash_seed: '7' (this engine) != '0' (the pool)"),
        (changed(4, name="q"), "and none of its name"),
        (
            changed(4, planes=(UNKNOWN, spec_of(MODEL, 4).planes[1])),
            "tp_size: 4 (this engine) != 2 (the pool), and plane 'main' can't be split by heads",
        ),
    ],
)
def test_what_else_differs_is_said(start_store: Start, spec: PoolSpec, why: str) -> None:
    with ranks(start_store, 2) as source, ranks(start_store, 4, spec=spec) as target:
        keys = source.save(3)
        with pytest.raises(UnavailableError) as caught:
            target.pull(source.store.endpoint, keys)
        assert why in str(caught.value)
        source.settled()
        target.settled()


# Peers that lie


def _pool(spec: PoolSpec, **offer: int) -> Change:
    def change(response: pb.OfferResponse) -> None:
        response.pool.CopyFrom(spec.to_proto())
        for name, value in offer.items():
            setattr(response, name, value)

    return change


def _no_heads(offer: pb.OfferResponse) -> None:
    offer.pool.planes[0].heads = 3


SLOT = len(slot_of(MODEL, 2))
LIES: dict[str, Change] = {
    "its own layout": lambda offer: offer.ClearField("pool"),
    "a pool that is none": lambda offer: offer.pool.Clear(),
    "heads that can not be": _no_heads,
    "no planes": lambda offer: offer.pool.ClearField("planes"),
    "another model": _pool(changed(2, model="other")),
    "another TP size": _pool(changed(1)),
    "another TP size, with its blocks": _pool(changed(8), slot_bytes=len(slot_of(MODEL, 8))),
    "heads in another place": _pool(changed(1), slot_bytes=SLOT),
    "larger blocks": lambda offer: setattr(offer, "slot_bytes", 2 * SLOT),
    "wrong digests": lambda offer: setattr(offer, "digests", bytes(len(offer.digests))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_the_pull_only(pair: Pair, lie: str) -> None:
    lie_costs_the_pull_only(pair, LIES[lie])


def test_a_pool_that_is_asked_for_is_checked(pair: Pair) -> None:
    source, _ = pair
    keys = source.save(3)
    asked = spec_of(MODEL, 4)
    broken = [
        (lambda pool: setattr(pool, "tp_size", 33), "tp_size: 33 given"),
        (lambda pool: setattr(pool.planes[0], "heads", 3), "heads: 3 given"),
        (lambda pool: setattr(pool.planes[0], "head_runs", 0), "head_runs: 0 given"),
        (lambda pool: pool.ClearField("planes"), "planes (count): 0 given"),
        (lambda pool: setattr(pool, "model", "other"), "its id is another"),
    ]
    for change, text in broken:
        request = pb.OfferRequest(
            pool_id=asked.pool_id(), keys=keys[0], lease_ms=1000, wait_ms=60_000, pool=asked.to_proto()
        )
        change(request.pool)
        with pytest.raises(grpc.RpcError) as caught:
            source.peer.Offer(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in caught.value.details()
    source.settled()


def test_a_store_that_does_not_say_its_pool_is_offered_its_own_only(pair: Pair) -> None:
    """RemoteBlocks, and stores of an older version."""
    source, _ = pair
    keys = source.save(3)
    for tp, code in ((2, None), (4, grpc.StatusCode.NOT_FOUND)):
        request = pb.OfferRequest(pool_id=spec_of(MODEL, tp).pool_id(), keys=keys[0], lease_ms=1000)
        with ExitStack() as exits:
            if code is not None:
                caught = exits.enter_context(pytest.raises(grpc.RpcError))
            offer = source.peer.Offer(request, timeout=10)
            assert (offer.blocks, offer.HasField("pool")) == (1, False)
            source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))
        if code is not None:
            assert caught.value.code() is code
    source.settled()


def test_padding_is_of_no_account() -> None:
    """What tests of contents compare is all but that."""
    one, other = (slot_of(MODEL, 4, fill=fill) for fill in (1, 2))
    spec = spec_of(MODEL, 4)
    payload = sum(sum(plane.layer_bytes) * plane.shards for plane in spec.planes)
    assert np.count_nonzero(one == other) == payload
