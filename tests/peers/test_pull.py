"""Blocks from one store to another, with both alive, killed and stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvsieve.v1 import admin_pb2, admin_pb2_grpc, peer_pb2_grpc
from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import UnavailableError
from kvsieve_store.transport.ucx.binding import why_missing
from tests.conftest import StoreProcess
from tests.peers.conftest import BLOCK, SPEC, WAIT, Host, host
from tests.protocol.client_stores import chain

COUNT = 300
Pair = tuple[Host, Host]


@pytest.fixture(autouse=True)
def _ucx(request: pytest.FixtureRequest) -> None:
    if (
        "transport" in request.fixturenames
        and request.getfixturevalue("transport") == "ucx"
        and why_missing()
    ):
        pytest.skip(str(why_missing()))


def test_a_chain_is_pulled_and_found(pair: Pair, transport: str) -> None:
    source, target = pair
    keys = source.save(COUNT)
    answer = target.pull(source.store.endpoint, keys)
    assert (answer.present, answer.pulled, answer.damaged, answer.reason) == (COUNT, COUNT, 0, "")
    assert target.holds(keys) == COUNT
    text = f'kvsieve_peer_read_bytes_total{{peer="{source.store.endpoint}",transport="{transport}"}}'
    assert text in target.store.metrics()
    assert target.metric("kvsieve_peer_read_bytes_total") == COUNT * BLOCK
    assert target.metric("kvsieve_peer_pulled_blocks_total") == COUNT
    assert source.metric("kvsieve_peer_offered_blocks_total") == COUNT
    # Again: all is here.
    answer = target.pull(source.store.endpoint, keys)
    assert (answer.present, answer.pulled, answer.reason) == (COUNT, 0, "")
    source.settled()
    target.settled()


def test_what_is_here_is_not_pulled_and_what_is_nowhere_ends_it(pair: Pair) -> None:
    source, target = pair
    keys = source.save(40)
    target.save(10)
    answer = target.pull(source.store.endpoint, keys[:30])
    assert (answer.present, answer.pulled) == (30, 20)
    answer = target.pull(source.store.endpoint, keys + chain(5, start=1000), parent=b"")
    assert (answer.present, answer.pulled) == (40, 10)
    assert "no more" in answer.reason
    assert target.holds(keys) == 40


def test_pulls_at_the_same_time_share_a_link(pair: Pair) -> None:
    source, target = pair
    all_keys = [source.save(60, start=100 * i) for i in range(4)]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda keys: target.pull(source.store.endpoint, keys), all_keys))
    assert [answer.pulled for answer in answers] == [60] * 4
    for i, keys in enumerate(all_keys):
        assert target.holds(keys, start=100 * i) == 60
    source.settled()
    target.settled()


def test_the_source_is_killed_and_comes_back(pair: Pair) -> None:
    source, target = pair
    keys = source.save(COUNT)
    killer = threading.Timer(0.05, source.store.kill)
    killer.start()
    # What came before is kept; the rest is asked for again, of a store that has nothing now.
    call = target.start_pull(source.store.endpoint, keys)
    if call.exception(60) is None:
        present = call.result().present
        assert present == COUNT or call.result().reason
    else:
        present = 0
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    killer.join()
    assert target.holds(keys) == present
    source.store.start()
    assert source.save(COUNT) == keys
    assert target.pull(source.store.endpoint, keys).present == COUNT
    assert target.holds(keys) == COUNT
    target.settled()


def test_the_target_is_killed_in_the_middle(pair: Pair) -> None:
    source, target = pair
    keys = source.save(COUNT)
    for delay in (0.01, 0.05):
        call = target.start_pull(source.store.endpoint, keys)
        time.sleep(delay)
        target.store.kill()
        assert call.exception() is not None or call.result().present == COUNT
        target.store.start()
        target.client.wait_attached(WAIT)
    # The source goes on. What it had leased for the dead one comes back, since nobody renews its offers.
    assert target.pull(source.store.endpoint, keys).present == COUNT
    assert target.holds(keys) == COUNT
    assert source.holds(keys) == COUNT
    source.settled()


def test_the_source_is_stopped(pair: Pair) -> None:
    source, target = pair
    keys = source.save(COUNT)
    target.pull(source.store.endpoint, keys[:1])  # there is a link already
    source.store.process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        answer = target.pull(source.store.endpoint, keys, seconds=1.5)
        assert "timeout_ms" in answer.reason
        assert answer.present >= 1
        assert time.monotonic() - started < WAIT
        target.settled()  # no slot is kept for it
    finally:
        source.store.process.send_signal(signal.SIGCONT)
    assert target.pull(source.store.endpoint, keys).present == COUNT
    assert target.holds(keys) == COUNT


def test_a_caller_that_gives_up_leaves_nothing(pair: Pair) -> None:
    source, target = pair
    keys = source.save(COUNT)
    for delay in (*(n / 500 for n in range(20)), 0.05, 0.1):
        call = target.start_pull(source.store.endpoint, keys)
        time.sleep(delay)
        call.cancel()
    target.settled()
    source.settled()
    assert target.pull(source.store.endpoint, keys).present == COUNT
    assert target.holds(keys) == COUNT


class _Forger(peer_pb2_grpc.PeerServicer):
    """Offers what `source` offers, with a wrong digest of one block."""

    def __init__(self, source: Host, bad: int) -> None:
        self.source, self.bad = source, bad

    def Offer(self, request: pb.OfferRequest, context: object) -> pb.OfferResponse:
        offer = self.source.peer.Offer(request)
        digests = bytearray(offer.digests)
        digests[32 * self.bad] ^= 1
        offer.digests = bytes(digests)
        return offer

    def Withdraw(self, request: pb.WithdrawRequest, context: object) -> pb.WithdrawResponse:
        return self.source.peer.Withdraw(request)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
class TestWaiting:
    """Blocks that the source has not got yet."""

    def test_blocks_come_as_they_are_sealed(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        keys = chain(30)
        with ThreadPoolExecutor() as pool:
            pulled = pool.submit(target.pull, source.store.endpoint, keys, wait_seconds=WAIT)
            for start in (0, 10, 20):
                assert source.save(10, start) == keys[start : start + 10]
                while target.metric("kvsieve_peer_pulled_blocks_total") < start + 10:
                    time.sleep(0.01)
            answer = pulled.result(WAIT)
        assert (answer.present, answer.pulled, answer.reason) == (30, 30, "")
        assert target.holds(keys) == 30
        source.settled()
        target.settled()

    def test_it_ends_when_nothing_comes_for_so_long(self, pair: Pair) -> None:
        source, target = pair
        keys = source.save(5)
        answer = target.pull(source.store.endpoint, keys + chain(5, start=5), wait_seconds=0.3)
        assert (answer.present, answer.pulled) == (5, 5)
        assert "no more" in answer.reason
        source.settled()
        target.settled()

    def test_pulls_of_the_same_blocks_bring_each_once(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        keys = chain(20)
        with ThreadPoolExecutor() as pool:
            pulls = [
                pool.submit(target.pull, source.store.endpoint, keys[:n], wait_seconds=WAIT)
                for n in (20, 20, 15, 10)
            ]
            source.save(20)
            answers = [pull.result(WAIT) for pull in pulls]
        assert [answer.present for answer in answers] == [20, 20, 15, 10]
        assert sum(answer.pulled for answer in answers) == 20
        assert target.metric("kvsieve_peer_read_bytes_total") == 20 * BLOCK

    def test_who_waits_goes_on_when_the_pull_that_brings_the_blocks_is_cancelled(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        target.client.wait_attached(WAIT)
        keys = chain(10)
        first = target.client.pull_async(source.store.endpoint, keys, seconds=WAIT, wait_seconds=WAIT)
        while not source.metric("kvsieve_peer_waiting_offers"):
            time.sleep(0.01)
        second = target.client.pull_async(source.store.endpoint, keys, seconds=WAIT, wait_seconds=WAIT)
        first.cancel()
        source.save(10)
        assert second.result(WAIT).pulled == 10
        source.settled()
        target.settled()

    def test_who_waits_for_another_pull_has_its_own_patience(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        target.client.wait_attached(WAIT)
        keys = chain(10)
        first = target.client.pull_async(source.store.endpoint, keys, seconds=WAIT, wait_seconds=WAIT)
        while not source.metric("kvsieve_peer_waiting_offers"):
            time.sleep(0.01)
        second = target.pull(source.store.endpoint, keys, wait_seconds=0.2)
        assert (second.present, "no more" in second.reason, first.done()) == (0, True, False)
        source.save(10)
        assert first.result(WAIT).pulled == 10
        source.settled()
        target.settled()

    def test_what_is_cancelled_waits_no_more(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        target.client.wait_attached(WAIT)
        pulls = [
            target.client.pull_async(source.store.endpoint, chain(3, start=10 * n), wait_seconds=WAIT)
            for n in range(5)
        ]
        while source.metric("kvsieve_peer_waiting_offers") < 5:
            time.sleep(0.01)
        for pull in pulls:
            pull.cancel()
        while source.metric("kvsieve_peer_waiting_offers"):
            time.sleep(0.01)
        source.settled()
        target.settled()

    def test_a_session_that_ends_takes_its_pulls_along(self, pair: Pair) -> None:
        source, target = pair
        source.client.wait_attached(WAIT)
        call = target.start_pull(source.store.endpoint, chain(3), wait_ms=60_000)
        while not source.metric("kvsieve_peer_waiting_offers"):
            time.sleep(0.01)
        target.client.close()
        while source.metric("kvsieve_peer_waiting_offers") or target.metric("kvsieve_peer_pulls"):
            time.sleep(0.01)
        call.cancel()
        source.settled()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
class TestHolds:
    """Blocks that are kept until another store has them."""

    def leases(self, source: Host) -> float:
        return source.metric("kvsieve_leases")

    def test_a_hold_ends_once_its_last_block_was_taken(self, pair: Pair) -> None:
        source, target = pair
        keys = source.save(10)
        assert source.client.hold(keys + chain(2, start=50), seconds=60) == 10
        assert (self.leases(source), source.metric("kvsieve_peer_holds")) == (1, 1)
        target.pull(source.store.endpoint, keys[:9])
        while source.metric("kvsieve_peer_offers"):
            time.sleep(0.01)
        assert source.metric("kvsieve_peer_holds") == 1
        target.pull(source.store.endpoint, keys)
        source.settled()
        assert source.metric("kvsieve_peer_holds") == 0
        assert source.metric("kvsieve_peer_taken_holds_total") == 1
        source.settled()

    def test_what_was_taken_before_is_not_held(self, pair: Pair) -> None:
        source, target = pair
        keys = source.save(10)
        target.pull(source.store.endpoint, keys)
        source.settled()
        assert source.client.hold(keys, seconds=60) == 0
        source.settled()
        assert source.client.hold(keys, seconds=1) == 10  # another hand-off of the same prompt
        source.settled()

    def test_a_hold_outlives_its_engine_and_runs_out(self, pair: Pair) -> None:
        source, _ = pair
        keys = source.save(10)
        assert source.client.hold(keys, seconds=2) == 10
        assert source.client.hold(keys, seconds=2) == 10  # again: the same hold, longer
        assert self.leases(source) == 1
        source.client.close()
        assert self.leases(source) == 1
        source.settled()
        assert source.metric("kvsieve_peer_expired_holds_total") == 1

    def test_bad_holds(self, pair: Pair) -> None:
        source, _ = pair
        keys = source.save(2)
        good = {"session_id": source.session_id, "keys": b"".join(keys), "hold_ms": 1000}
        for fields, code, text in [
            ({"keys": b"x"}, "INVALID_ARGUMENT", "keys"),
            ({"keys": b""}, "INVALID_ARGUMENT", "keys"),
            ({"hold_ms": 0}, "INVALID_ARGUMENT", "hold_ms"),
            ({"hold_ms": 600_001}, "INVALID_ARGUMENT", "hold_ms"),
            ({"session_id": bytes(16)}, "NOT_FOUND", "session_id"),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                source.peer.Hold(pb.HoldRequest(**(good | fields)))
            assert (caught.value.code().name, text in caught.value.details()) == (code, True)
        assert source.client.hold(chain(2, start=90), seconds=1) == 0
        source.settled()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
class TestOnce:
    """What does not depend on the transport."""

    def test_damaged_blocks_are_not_taken(self, pair: Pair) -> None:
        source, target = pair
        keys = source.save(10)
        server = grpc.server(ThreadPoolExecutor(2))
        peer_pb2_grpc.add_PeerServicer_to_server(_Forger(source, bad=6), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        answer = target.pull(address, keys)
        target.settled()
        server.stop(0)
        assert (answer.present, answer.damaged) == (6, 2)
        assert "damaged" in answer.reason
        assert target.holds(keys) == 6
        assert target.metric("kvsieve_peer_damaged_blocks_total") == 2
        target.settled()
        source.settled()

    def test_a_full_store_takes_what_fits(self, start_store: Callable[..., StoreProcess], pair: Pair) -> None:
        source, _ = pair
        keys = source.save(100)
        with host(start_store, "--peer-transports", "tcp", "--pool-size", "8MiB") as small:
            small.client.wait_attached(WAIT)
            answer = small.pull(source.store.endpoint, keys)
            assert answer.present < 100 or small.holds(keys) < 100
            small.settled()
        source.settled()

    def test_an_offer_runs_out(self, pair: Pair) -> None:
        source, _ = pair
        keys = source.save(3)
        request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=b"".join(keys), lease_ms=1)
        offer = source.peer.Offer(request)
        assert (offer.blocks, offer.digests) == (3, b"")
        source.settled()
        source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))

    def test_an_offer_that_is_renewed_lasts(self, pair: Pair) -> None:
        source, _ = pair
        keys = source.save(3)
        request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=b"".join(keys), lease_ms=2_000)
        kept, left = source.peer.Offer(request), source.peer.Offer(request)
        while source.metric("kvsieve_peer_offers") > 1:
            source.peer.Renew(pb.RenewRequest(token=kept.token, lease_ms=60_000))
            time.sleep(0.05)
        source.peer.Renew(pb.RenewRequest(token=kept.token, lease_ms=1))
        source.settled()
        for token, lease_ms, code, text in [
            (left.token, 1000, "NOT_FOUND", "run out"),
            (bytes(16), 1000, "NOT_FOUND", "token"),
            (kept.token, 0, "INVALID_ARGUMENT", "lease_ms"),
            (kept.token, 600_001, "INVALID_ARGUMENT", "lease_ms"),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                source.peer.Renew(pb.RenewRequest(token=token, lease_ms=lease_ms))
            assert (caught.value.code().name, text in caught.value.details()) == (code, True)

    def test_an_offer_is_renewed_while_the_store_drains(self, pair: Pair) -> None:
        source, _ = pair
        keys = source.save(3)
        request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=b"".join(keys), lease_ms=60_000)
        token = source.peer.Offer(request).token
        admin = admin_pb2_grpc.AdminStub(source.channel)
        drain = admin.Drain.future(admin_pb2.DrainRequest(timeout_ms=60_000))
        while admin.Status(admin_pb2.StatusRequest()).state != "draining":
            time.sleep(0.01)
        source.peer.Renew(pb.RenewRequest(token=token, lease_ms=60_000))
        assert not drain.done()
        source.peer.Withdraw(pb.WithdrawRequest(token=token))
        assert drain.result(WAIT).leases_left == 0

    @pytest.mark.parametrize(
        ("fields", "code", "text"),
        [
            ({"keys": b"x"}, "INVALID_ARGUMENT", "keys"),
            ({"keys": b""}, "INVALID_ARGUMENT", "keys"),
            ({"keys": bytes(32)}, "INVALID_ARGUMENT", "keys[0]"),
            ({"parent": b"x"}, "INVALID_ARGUMENT", "parent"),
            ({"timeout_ms": 0}, "INVALID_ARGUMENT", "timeout_ms"),
            ({"wait_ms": 600_001}, "INVALID_ARGUMENT", "wait_ms"),
            ({"source": ""}, "INVALID_ARGUMENT", "source"),
            ({"source": "nonsense"}, "INVALID_ARGUMENT", "source"),
            ({"source": "192.0.2.1:9"}, "INVALID_ARGUMENT", "loopback"),
            ({"session_id": bytes(16)}, "NOT_FOUND", "session_id"),
            ({"source": "127.0.0.1:1"}, "UNAVAILABLE", "127.0.0.1:1"),
            ({"source": "unix:///nowhere/x.sock"}, "UNAVAILABLE", "/nowhere"),
        ],
    )
    def test_bad_pulls(self, pair: Pair, fields: dict[str, object], code: str, text: str) -> None:
        source, target = pair
        target.client.wait_attached(WAIT)
        request = pb.PullRequest(
            session_id=target.session_id,
            source=source.store.endpoint,
            keys=b"".join(chain(2)),
            timeout_ms=60_000,
        )
        for name, value in fields.items():
            setattr(request, name, value)
        with pytest.raises(grpc.RpcError) as caught:
            target.peer.Pull(request, timeout=60)
        assert (caught.value.code().name, text in caught.value.details()) == (code, True), caught.value
        target.settled()

    @pytest.mark.parametrize(
        ("fields", "code", "text"),
        [
            ({"pool_id": bytes(32)}, "NOT_FOUND", "pool_id"),
            ({"keys": b"x"}, "INVALID_ARGUMENT", "keys"),
            ({"lease_ms": 0}, "INVALID_ARGUMENT", "lease_ms"),
            ({"lease_ms": 600_001}, "INVALID_ARGUMENT", "lease_ms"),
            ({"wait_ms": 60_001}, "INVALID_ARGUMENT", "wait_ms"),
        ],
    )
    def test_bad_offers(self, pair: Pair, fields: dict[str, object], code: str, text: str) -> None:
        source, _ = pair
        keys = source.save(2)
        request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=b"".join(keys), lease_ms=1000)
        for name, value in fields.items():
            setattr(request, name, value)
        with pytest.raises(grpc.RpcError) as caught:
            source.peer.Offer(request)
        assert (caught.value.code().name, text in caught.value.details()) == (code, True), caught.value
        source.settled()

    def test_a_store_that_serves_no_peers_says_so(self, store: StoreProcess, pair: Pair) -> None:
        _, target = pair
        with pytest.raises(UnavailableError, match="peer_listen"):
            target.pull(store.endpoint, chain(2))
