"""Stores and clients that die, freeze and come back, in processes of their own."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvsieve_store.client import AdminClient, ArenaMap, ClientState, SealResult, StoreClient
from kvsieve_store.errors import UnavailableError
from tests.conftest import StoreProcess
from tests.fault.proxy import Proxy
from tests.protocol.client_stores import SPEC, chain, entries, until, write_chain

ENGINE = """
import pickle, sys, time
from kvsieve_store.client import ArenaMap, StoreClient
endpoint, spec, keys = pickle.loads(sys.stdin.buffer.read())
def say(*words):
    print(*words, flush=True)
client = StoreClient(endpoint, spec, engine_id="engine", credit_target=20, on_change=say)
client.start()
with ArenaMap(client.wait_attached(20)) as arena:
    refs = client.take_credits(10)
    match = client.match(keys)
    say(len(refs), len(match.refs))
    while True:
        arena.update(client.wait_attached(600))
        time.sleep(0.05)
"""


@contextmanager
def engine_process(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that holds ten slots, a lease on chain(2), and its lock."""
    command = [sys.executable, "-c", ENGINE]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        engine.stdin.write(pickle.dumps((endpoint, SPEC, b"".join(chain(2)))))
        engine.stdin.close()
        assert engine.stdout.readline() == b"attached\n"
        assert engine.stdout.readline() == b"10 2\n"
        yield engine
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


def test_a_killed_store_is_noticed_at_once_and_its_successor_found(store: StoreProcess) -> None:
    changes: list[str] = []
    # No deadline helps here: what ends the calls is the end of the stream.
    with StoreClient(
        store.endpoint, SPEC, engine_id="test", credit_target=16, timeout=600, on_change=changes.append
    ) as c:
        first = c.wait_attached(20)
        write_chain(c, chain(3))
        stale = c.take_credits(2)
        with ArenaMap(first) as arena:
            arena.slot(stale[0].slot)[:] = 5
            assert store.process is not None
            store.process.send_signal(signal.SIGSTOP)
            pending = [
                c.match_async(chain(3)),
                c.seal_async(entries(chain(1, start=9), stale)),
                c.release_async(refs=stale[1:]),
            ]
            store.kill()
            for call in pending:
                assert isinstance(call.exception(20), UnavailableError)
            until(lambda: c.state == ClientState.CONNECTING)
            assert (c.attachment, c.credits, c.take_credits(1)) == (None, 0, [])
            with pytest.raises(UnavailableError, match="no session with the store"):
                c.match(chain(3))
            assert (arena.slot(stale[0].slot) == 5).all()

            store.start()
            second = c.wait_attached(20)
            assert second.epoch == 2
            assert second.instance != first.instance
            with pytest.raises(UnavailableError, match=r"epoch: 1 given"):
                c.seal(entries(chain(2), stale), epoch=first.epoch)
            arena.update(second)
            refs = c.take_credits(3)
            for ref in refs:
                assert arena.generation(ref.slot) == ref.generation
            assert c.match(chain(3)).refs == ()
            assert c.seal(entries(chain(3), refs), epoch=2) == [SealResult.SEALED] * 3
            assert c.match(chain(3)).refs == tuple(refs)
    assert changes == ["attached", "connecting", "attached", "closed"]


@pytest.mark.parametrize("listen", ["unix", "tcp"])
def test_a_store_that_stands_still_is_noticed_and_found_again(
    start_store: Callable[..., StoreProcess], listen: str, unused_port: int
) -> None:
    """Its kernel takes what is sent to it; only a ping tells. No call has a deadline that helps."""
    address = f"127.0.0.1:{unused_port}"
    store = start_store("--extent-size", "1MiB", "--listen", address)
    endpoint = address if listen == "tcp" else store.endpoint
    changes: list[str] = []
    with StoreClient(
        endpoint, SPEC, engine_id="test", credit_target=16, timeout=600, on_change=changes.append
    ) as c:
        first = c.wait_attached(20)
        write_chain(c, chain(3))
        assert store.process is not None
        store.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        pending = [c.match_async(chain(3)), c.seal_async(entries(chain(1, start=9), c.take_credits(1)))]
        try:
            for call in pending:
                assert isinstance(call.exception(20), UnavailableError)
            assert time.monotonic() - stopped < 7  # about 5
            until(lambda: c.state == ClientState.CONNECTING)
        finally:
            store.process.send_signal(signal.SIGCONT)
        second = c.wait_attached(20)
        assert (second.epoch, second.instance) == (2, first.instance)
        assert len(c.match(chain(3)).refs) == 3
        write_chain(c, chain(2, start=20))
        with AdminClient(store.endpoint) as admin:
            until(lambda: [s.state for s in admin.list_sessions().sessions] == ["attached"])
    assert changes == ["attached", "connecting", "attached", "closed"]


def test_a_connection_that_breaks_costs_a_session_but_no_mapping(store: StoreProcess) -> None:
    """The old session's slots stay taken while its lock is held, though both share the memory."""
    with (
        Proxy(store.endpoint) as proxy,
        StoreClient(proxy.endpoint, SPEC, engine_id="test", credit_target=16) as c,
        AdminClient(store.endpoint) as admin,
        ArenaMap(c.wait_attached(20)) as old,
    ):
        held = c.seal(entries(chain(1), c.take_credits(1)), hold=True)
        (slot,) = [ref.slot for ref in c.match(chain(1)).refs]
        old.slot(slot)[:] = 5
        proxy.cut()
        until(lambda: c.state == ClientState.CONNECTING)
        assert old.memory.store_lives()
        proxy.mend()
        with ArenaMap(c.wait_attached(20), old.memory) as new:
            assert (new.attachment.epoch, new.attachment.instance) == (2, old.attachment.instance)
            assert addresses(new) == addresses(old)
            assert sorted(s.state for s in admin.list_sessions().sessions) == ["attached", "fencing"]
            assert c.match(chain(1)).refs[0].slot == slot
            with pytest.raises(UnavailableError, match=r"epoch: 1 given"):
                c.release(held.lease_ids, epoch=held.epoch)
            assert admin.evict("tests", keys=chain(1)).skipped == 1
            old.close()
            until(lambda: [s.state for s in admin.list_sessions().sessions] == ["attached"])
            assert (new.slot(slot) == 5).all()
            assert c.seal(entries(chain(1, start=1), c.take_credits(1)), epoch=2) == [SealResult.SEALED]


def addresses(arena: ArenaMap) -> list[int]:
    return [int(segment.ctypes.data) for segment in arena.segments]


def test_a_client_may_come_before_its_store() -> None:
    store = StoreProcess()
    try:
        with StoreClient(store.endpoint, SPEC, engine_id="early") as c:
            until(lambda: c.error is not None)
            assert c.state == ClientState.CONNECTING
            assert store.endpoint in str(c.error)
            store.start()
            assert c.wait_attached(20).epoch == 1
    finally:
        store.close()


def test_slots_and_leases_of_a_killed_engine_return(start_store: Callable[..., StoreProcess]) -> None:
    endpoint = start_store("--extent-size", "1MiB").endpoint
    with (
        StoreClient(endpoint, SPEC, engine_id="writer", credit_target=0) as writer,
        AdminClient(endpoint) as admin,
    ):
        writer.wait_attached(20)
        writer.reserve(2)
        write_chain(writer, chain(2))
        with engine_process(endpoint) as engine:
            (pool,) = admin.list_pools().pools
            assert (pool.writing_slots, pool.leased_blocks) == (20, 2)
            engine.kill()
            until(lambda: [s.engine_id for s in admin.list_sessions().sessions] == ["writer"])
            (pool,) = admin.list_pools().pools
            assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 2)


def test_an_engine_that_was_frozen_too_long_comes_back(start_store: Callable[..., StoreProcess]) -> None:
    endpoint = start_store("--extent-size", "1MiB", "--session-timeout", "1").endpoint
    with (
        StoreClient(endpoint, SPEC, engine_id="writer", credit_target=0) as writer,
        AdminClient(endpoint) as admin,
    ):
        writer.wait_attached(20)
        writer.reserve(2)
        write_chain(writer, chain(2))
        with engine_process(endpoint) as engine:
            engine.send_signal(signal.SIGSTOP)
            # Silent, but alive: it may still write, so its slots are fenced, not free.
            until(lambda: "fencing" in [s.state for s in admin.list_sessions().sessions])
            assert admin.list_pools().pools[0].writing_slots == 20
            engine.send_signal(signal.SIGCONT)
            assert engine.stdout is not None
            assert [engine.stdout.readline() for _ in range(2)] == [b"connecting\n", b"attached\n"]
            until(lambda: [s.state for s in admin.list_sessions().sessions] == ["attached"] * 2)
