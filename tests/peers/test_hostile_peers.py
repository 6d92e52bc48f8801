"""Peers that lie, hang, or ask for more than their part: they cost themselves, and nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from kvsieve_store.addresses import TcpAddress, parse_address
from kvsieve_store.client import AdminClient, StoreClient
from kvsieve_store.errors import CapacityError, InvalidRequestError
from kvsieve_store.peers.puller import MAX_PULLS, MAX_PULLS_PER_SESSION
from kvsieve_store.peers.waits import MAX_WAITS_PER_PEER
from kvsieve_store.transport.shm import boot_id
from kvsieve_store.transport.wire import Head, Kind, Status
from tests.conftest import StoreProcess, free_port
from tests.peers.conftest import BLOCK, SPEC, WAIT, Host, host
from tests.peers.liars import Change, liar, lie_costs_the_pull_only
from tests.protocol.client_stores import SPEC as SMALL_SPEC
from tests.protocol.client_stores import chain, store_thread, write_chain

Pair = tuple[Host, Host]


@pytest.fixture(params=["tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _elsewhere(address: str) -> Change:
    def change(offer: pb.OfferResponse) -> None:
        offer.description = json.dumps({"tcp": address}).encode()

    return change


def _mapped_from(path: str) -> Change:
    segment = {"path": path, "size": 1 << 20, "device": 1, "inode": 1}

    def change(offer: pb.OfferResponse) -> None:
        offer.description = json.dumps(
            {"tcp": "127.0.0.1:1", "host": boot_id(), "segments": [segment]}
        ).encode()

    return change


LIES: dict[str, Change] = {
    "more blocks than asked for": lambda offer: setattr(offer, "blocks", 4000),
    "larger blocks": lambda offer: setattr(offer, "slot_bytes", 2 * BLOCK),
    "no size": lambda offer: setattr(offer, "slot_bytes", 0),
    "digests are missing": lambda offer: setattr(offer, "digests", offer.digests[:-1]),
    "all digests are wrong": lambda offer: setattr(offer, "digests", bytes(len(offer.digests))),
    "another token": lambda offer: setattr(offer, "token", bytes(16)),
    "a short token": lambda offer: setattr(offer, "token", b"x"),
    "no description": lambda offer: setattr(offer, "description", b""),
    "a description that is none": lambda offer: setattr(offer, "description", b"\xff{"),
    "a path as its address": _elsewhere("unix:///etc/passwd"),
    "an address where nobody is": _elsewhere("127.0.0.1:1"),
    "a name that is none": _elsewhere("a..b:80"),
    "a name with a long label": _elsewhere(f"{'a' * 64}.b:80"),
    "an address without end": _elsewhere(f"{'a' * 100_000}:80"),
}
LIES_OF_PATHS: dict[str, Change] = {
    "a path with a NUL": _mapped_from("/\0"),
    "a path that is no text": _mapped_from("/\ud800"),
}


@pytest.mark.parametrize(
    ("transport", "lie"),
    [("tcp", lie) for lie in LIES] + [("shm,tcp", lie) for lie in LIES_OF_PATHS],
    indirect=["transport"],
)
def test_a_lie_costs_the_pull_only(pair: Pair, lie: str) -> None:
    lie_costs_the_pull_only(pair, (LIES | LIES_OF_PATHS)[lie])


def test_an_offer_that_has_run_out_is_asked_for_anew(pair: Pair) -> None:
    source, target = pair
    keys = source.save(10)

    def late(offer: pb.OfferResponse) -> None:
        if server.offers == 1:
            source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))

    with liar(source, late) as (address, server):
        answer = target.pull(address, keys)
        assert (answer.present, answer.reason, server.offers) == (10, "", 2)
        target.settled()
    source.settled()


def test_peers_that_hang_keep_no_others_waiting(pair: Pair) -> None:
    source, target = pair
    keys = source.save(10)
    target.client.wait_attached(WAIT)
    with ExitStack() as exits:
        silent = exits.enter_context(socket.create_server(("127.0.0.1", 0)))
        change = _elsewhere(f"127.0.0.1:{silent.getsockname()[1]}")
        calls = []
        for _ in range(12):
            address, server = exits.enter_context(liar(source, change))
            calls.append(target.start_pull(address, keys[:1]))
            while not server.offers:
                time.sleep(0.01)
        time.sleep(0.2)  # all of them read
        answer = target.pull(source.store.endpoint, keys, seconds=5.0)
        assert (answer.present, answer.reason) == (10, "")
        for call in calls:
            call.cancel()
        target.settled()
    source.settled()


def test_a_host_has_its_part_of_the_waits_however_many_connections_it_has(
    start_store: Callable[..., StoreProcess], transport: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=chain(1)[0], lease_ms=1000, wait_ms=60_000)
    with host(start_store, "--listen", address) as source, ExitStack() as exits:
        source.client.wait_attached(WAIT)
        calls = []
        for _ in range(8):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = exits.enter_context(grpc.insecure_channel(address, options=options))
            stub = peer_pb2_grpc.PeerStub(channel)
            calls += [stub.Offer.future(request) for _ in range(MAX_WAITS_PER_PEER // 8)]
        while source.metric("kvsieve_peer_waiting_offers") < MAX_WAITS_PER_PEER:
            time.sleep(0.01)
        another = exits.enter_context(grpc.insecure_channel(address))
        with pytest.raises(grpc.RpcError) as caught:
            peer_pb2_grpc.PeerStub(another).Offer(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        source.settled()


@pytest.mark.parametrize("keys", [b"", b"x", bytes(33), bytes(32 * 32_769)])
def test_keys_that_are_none_are_not_waited_for(pair: Pair, keys: bytes) -> None:
    source, _ = pair
    source.client.wait_attached(WAIT)
    request = pb.OfferRequest(pool_id=SPEC.pool_id(), keys=keys, lease_ms=1000, wait_ms=60_000)
    with pytest.raises(grpc.RpcError) as caught:
        source.peer.Offer(request, timeout=10)
    assert (caught.value.code().name, "keys" in caught.value.details()) == ("INVALID_ARGUMENT", True)


def test_one_client_leaves_room_for_the_pulls_of_another(pair: Pair) -> None:
    source, target = pair
    source.client.wait_attached(WAIT)
    keys = source.save(3)
    with StoreClient(target.store.endpoint, SPEC, engine_id="greedy", credit_target=0) as greedy:
        greedy.wait_attached(WAIT)
        waiting = [
            greedy.pull_async(source.store.endpoint, chain(1, start=1000 + n), wait_seconds=WAIT)
            for n in range(MAX_PULLS)
        ]
        refused = as_completed(waiting, WAIT)  # any of them: they may overtake one another
        for pull in islice(refused, MAX_PULLS - MAX_PULLS_PER_SESSION):
            assert isinstance(pull.exception(), CapacityError)
            assert str(MAX_PULLS_PER_SESSION) in str(pull.exception())
        waiting = [pull for pull in waiting if not pull.done()]
        assert len(waiting) == MAX_PULLS_PER_SESSION
        assert target.pull(source.store.endpoint, keys).present == 3
        assert target.metric("kvsieve_peer_pulls") == MAX_PULLS_PER_SESSION
        waiting[0].cancel()  # gives its place back
        while target.metric("kvsieve_peer_pulls") == MAX_PULLS_PER_SESSION:
            time.sleep(0.01)
        while True:
            with suppress(CapacityError):  # it counts until the other store has heard of it
                assert greedy.pull(source.store.endpoint, keys).present == 3
                break
            time.sleep(0.01)
        assert not any(pull.done() for pull in waiting[1:])
    source.settled()
    target.settled()


def test_an_offer_is_renewed_while_a_read_goes_on_and_no_longer(pair: Pair) -> None:
    source, target = pair
    keys = source.save(3)
    target.client.wait_attached(WAIT)
    with ExitStack() as exits:
        slow = exits.enter_context(socket.create_server(("127.0.0.1", 0)))
        over = threading.Event()

        def trickle() -> None:
            """A byte now and then: the link is slow, and not silent."""
            sock, _ = slow.accept()
            with sock, suppress(OSError):
                head = Head(Kind.READ, Status.OK, 1, 3 * BLOCK).pack()
                for byte in head + bytes(3 * BLOCK):
                    sock.sendall(bytes([byte]))
                    if over.wait(0.3):
                        break

        thread = threading.Thread(target=trickle)
        thread.start()
        address, server = exits.enter_context(liar(source, _elsewhere(f"127.0.0.1:{slow.getsockname()[1]}")))
        call = target.start_pull(address, keys)
        while len(server.renewed) < 2:
            assert not call.done()
            time.sleep(0.05)
        assert set(server.renewed) == {server.token}
        call.cancel()
        over.set()
        thread.join()
        target.settled()
        source.settled()  # it was given back


def test_an_offer_is_not_renewed_past_the_lease_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsieve_store.peers.offers.MAX_LEASE_MS", 3_000)
    with store_thread(peer_listen="127.0.0.1:0", peer_transports="tcp") as endpoint, ExitStack() as exits:
        client = exits.enter_context(StoreClient(endpoint, SMALL_SPEC, engine_id="engine"))
        client.wait_attached(WAIT)
        write_chain(client, chain(2))
        peer = peer_pb2_grpc.PeerStub(exits.enter_context(grpc.insecure_channel(endpoint)))
        request = pb.OfferRequest(pool_id=SMALL_SPEC.pool_id(), keys=b"".join(chain(2)), lease_ms=3_000)
        renew = pb.RenewRequest(token=peer.Offer(request).token, lease_ms=3_000)
        end = time.monotonic() + WAIT
        while (call := peer.Renew.future(renew)).exception() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert call.code() is grpc.StatusCode.NOT_FOUND
        with AdminClient(endpoint) as admin:
            assert admin.status().leases == 0
            assert admin.evict("tests", count=2).evicted == 2


def test_a_store_connects_only_to_stores_that_it_was_told_of(
    start_store: Callable[..., StoreProcess], tmp_path: Path
) -> None:
    with ExitStack() as exits:
        listeners = [exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in listeners]
        listeners.append(exits.enter_context(socket.socket(socket.AF_UNIX)))
        listeners[-1].bind(str(tmp_path / "s.sock"))
        for listener in listeners:
            listener.listen()
            listener.setblocking(False)
        sources = [f"127.0.0.1:{ports[0]}", f"localhost:{ports[0]}", f"[::ffff:127.0.0.1]:{ports[0]}"]
        sources += [f"127.1:{ports[0]}", f"unix://{tmp_path}/s.sock", f"unix:{tmp_path}/x/../s.sock"]
        told = f"127.0.0.1:{ports[1]},unix://{tmp_path}/x/*"
        for flags in (("--peer-allow", ""), ("--peer-allow", told)):
            target = exits.enter_context(host(start_store, *flags))
            for source in sources:
                with pytest.raises(InvalidRequestError, match=r"source: .*peer_allow") as caught:
                    target.pull(source, chain(2))
                assert f"--peer-allow {source}" in str(caught.value)
            target.settled()
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
        call = target.start_pull(f"127.0.0.1:{ports[1]}", chain(2))
        listeners[1].setblocking(True)
        listeners[1].accept()[0].close()
        call.cancel()
        target.settled()


def test_a_store_that_it_was_told_of_is_pulled_from(
    start_store: Callable[..., StoreProcess], transport: str
) -> None:
    with host(start_store, "--peer-transports", transport) as source:
        keys = source.save(5)
        allow = ("--peer-allow", "10.0.0.0/8", "--peer-allow", f"unix://{source.store.dir}/*")
        with host(start_store, "--peer-transports", transport, *allow) as target:
            assert target.pull(source.store.endpoint, keys).present == 5
            assert target.holds(keys) == 5


def test_garbage_on_both_ports_disturbs_no_pull(pair: Pair) -> None:
    source, target = pair
    keys = source.save(60)
    offer = source.peer.Offer(pb.OfferRequest(pool_id=SPEC.pool_id(), keys=keys[0], lease_ms=60_000))
    source.peer.Withdraw(pb.WithdrawRequest(token=offer.token))
    data = parse_address(json.loads(offer.description)["tcp"])
    assert isinstance(data, TcpAddress)
    ports = [
        (socket.AF_INET, (data.host, data.port)),
        (socket.AF_UNIX, str(source.store.socket)),
    ]
    rng, stop = np.random.default_rng(0), threading.Event()

    def shout(family: int, address: object) -> int:
        count = 0
        while not stop.is_set():
            with suppress(OSError), socket.socket(family) as sock:
                sock.connect(address)
                sock.sendall(rng.bytes(int(rng.integers(1, 2000))))
                count += 1
        return count

    with ThreadPoolExecutor() as pool:
        shouting = [pool.submit(shout, *port) for port in ports]
        try:
            for n in range(1, 7):
                assert target.pull(source.store.endpoint, keys[: 10 * n]).present == 10 * n
        finally:
            stop.set()
        assert all(shouted.result(WAIT) for shouted in shouting)
    assert target.holds(keys) == 60
    target.settled()
    source.settled()
