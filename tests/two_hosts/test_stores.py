"""Two stores, without engines: what a link that is cut does to a pull, and to what is kept for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress

import grpc
import pytest

from kvsieve_store.client import Pulled, StoreClient
from kvsieve_store.errors import KVSieveError
from kvsieve_store.transport.ucx.binding import why_missing
from tests.conftest import StoreProcess
from tests.peers.conftest import SPEC, WAIT, Host
from tests.protocol.client_stores import chain
from tests.two_hosts.net import Net

pytestmark = pytest.mark.timeout(180)

COUNT = 200
SECONDS = 150.0
"""That a pull may take: no test waits for it."""


@pytest.fixture(params=["tcp", "ucx"])
def stores(
    request: pytest.FixtureRequest, two_hosts: Net, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Host, Host]]:
    """The store that has blocks, and the one that pulls them over the link."""
    monkeypatch.setenv("UCX_NET_DEVICES", "peer")
    if request.param == "ucx" and why_missing():
        pytest.skip(str(why_missing()))
    with ExitStack() as stack:
        found = []
        # Other ports than those of cluster.py, whose stores may still run.
        for host in (two_hosts.a, two_hosts.b):
            address = f"{host.peer}:9500"
            store = StoreProcess(
                *("--listen", address, "--allow-insecure-tcp", "--peer-listen", f"{host.peer}:9501"),
                *("--peer-transports", request.param, "--extent-size", "4MiB"),
                http=f"{host.here}:9417",
                netns=host.path,
            )
            stack.callback(store.close)
            store.start()
            client = StoreClient(store.endpoint, SPEC, engine_id="engine", credit_target=0)
            client.start()
            it = Host(store, client)
            it.address = address
            stack.callback(it.close)
            found.append(it)
        stack.callback(two_hosts.mend)
        yield found[0], found[1]


def start(target: Host, source: Host, keys: list[bytes], wait: float) -> Future[Pulled]:
    target.client.wait_attached(WAIT)
    return target.client.pull_async(source.address, keys, seconds=SECONDS, wait_seconds=wait)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def outcome(pull: Future[Pulled], seconds: float = SECONDS - 50) -> str:
    """Why the pull is not whole; it is over well before the time that it may take."""
    with suppress(KVSieveError):
        return pull.result(seconds).reason
    return str(pull.exception())


def test_a_link_that_is_cut_in_a_read_ends_the_pull(stores: tuple[Host, Host], two_hosts: Net) -> None:
    source, target = stores
    keys = source.save(COUNT)
    two_hosts.slow(20)
    pull = start(target, source, keys, 2.0)
    until(lambda: source.metric("kvsieve_peer_connections"))
    two_hosts.cut()
    reason = outcome(pull)
    assert reason
    assert "timeout_ms" not in reason
    target.settled()
    source.settled()  # the link is still cut: nobody has taken the offer back
    two_hosts.mend()
    assert target.pull(source.address, keys).present == COUNT
    assert target.holds(keys) == COUNT


def test_a_link_that_is_cut_in_a_wait_ends_it_as_the_wait_says(
    stores: tuple[Host, Host], two_hosts: Net
) -> None:
    source, target = stores
    source.client.wait_attached(WAIT)
    pull = start(target, source, chain(5), 5.0)
    until(lambda: source.metric("kvsieve_peer_waiting_offers"))
    two_hosts.cut()
    reason = outcome(pull, 60.0)
    assert reason
    assert "timeout_ms" not in reason
    until(lambda: not source.metric("kvsieve_peer_waiting_offers"))


def test_a_link_that_is_cut_and_mended_costs_time_only(stores: tuple[Host, Host], two_hosts: Net) -> None:
    source, target = stores
    keys = source.save(COUNT)
    two_hosts.slow(20)
    pull = start(target, source, keys, WAIT)
    until(lambda: source.metric("kvsieve_peer_connections"))
    two_hosts.cut()
    until(lambda: target.metric("kvsieve_peer_link_failures_total"))
    two_hosts.mend()
    assert pull.result(SECONDS).present == COUNT
    assert target.holds(keys) == COUNT
    target.settled()
    source.settled()


def test_a_store_that_was_killed_keeps_nothing_in_another(stores: tuple[Host, Host], two_hosts: Net) -> None:
    source, target = stores
    keys = source.save(COUNT)
    two_hosts.slow(20)
    call = target.start_pull(source.address, keys)
    until(lambda: source.metric("kvsieve_peer_offers"))
    target.store.kill()
    with pytest.raises(grpc.RpcError):
        call.result()
    source.settled()
