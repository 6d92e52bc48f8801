"""A store that stands still: others notice, by its bytes or by pings, and wait for it as they were told."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvsieve_store.client import Pulled
from kvsieve_store.errors import KVSieveError
from kvsieve_store.peers.pull import ATTEMPTS
from kvsieve_store.transport.ucx.binding import why_missing
from tests.peers.conftest import WAIT, Host
from tests.protocol.client_stores import chain

Pair = tuple[Host, Host]


@pytest.fixture(autouse=True)
def _ucx(transport: str) -> None:
    if transport == "ucx" and why_missing():
        pytest.skip(str(why_missing()))


@contextmanager
def stopped(host: Host) -> Iterator[None]:
    assert host.store.process is not None
    host.store.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        host.store.process.send_signal(signal.SIGCONT)


def failures(target: Host) -> list[str]:
    """What the store has logged of tries that failed."""
    return [line for line in target.store.log.read_text().splitlines() if "peers.pull: pull from" in line]


def outcome(target: Host, source: Host, keys: list[bytes]) -> Pulled | KVSieveError:
    """Of a pull without a wait, which may take much longer."""
    try:
        return target.pull(source.store.endpoint, keys, seconds=60.0)
    except KVSieveError as error:
        return error


@pytest.mark.parametrize("linked", [False, True])
def test_a_pull_without_a_wait_is_soon_over(pair: Pair, linked: bool) -> None:
    source, target = pair
    keys = source.save(20)
    if linked:
        target.pull(source.store.endpoint, keys[:1])
    with stopped(source):
        started = time.monotonic()
        ended = outcome(target, source, keys)
        assert time.monotonic() - started < 15  # of 60; about 5
        assert "timeout_ms" not in str(ended)
        assert not isinstance(ended, Pulled) or (ended.present, bool(ended.reason)) == (linked, True)
        assert 1 <= len(failures(target)) < ATTEMPTS
        target.settled()
    assert target.pull(source.store.endpoint, keys).present == 20
    assert target.holds(keys) == 20


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_ping_tells_of_a_store_that_stops_while_its_blocks_are_waited_for(pair: Pair) -> None:
    source, target = pair
    source.client.wait_attached(WAIT)
    target.client.wait_attached(WAIT)
    pull = target.client.pull_async(source.store.endpoint, chain(3), seconds=60.0, wait_seconds=8.0)
    while not source.metric("kvsieve_peer_waiting_offers"):
        time.sleep(0.01)
    with stopped(source):
        error = pull.exception(WAIT)
        assert "timeout_ms" not in (str(error) if error else pull.result().reason)
        # By its deadline the offer would have been given up later.
        assert "ping timeout" in failures(target)[0]
        target.settled()
    source.settled()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_store_that_goes_on_in_time_costs_time_only(pair: Pair) -> None:
    source, target = pair
    source.client.wait_attached(WAIT)
    target.client.wait_attached(WAIT)
    pull = target.client.pull_async(source.store.endpoint, chain(3), seconds=60.0, wait_seconds=WAIT)
    while not source.metric("kvsieve_peer_waiting_offers"):
        time.sleep(0.01)
    with stopped(source):
        while not failures(target):
            time.sleep(0.01)
    source.client.wait_attached(WAIT)
    source.save(3)
    assert pull.result(WAIT).present == 3
    assert target.holds(chain(3)) == 3
    target.settled()
    source.settled()
