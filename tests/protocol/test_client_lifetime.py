"""A client's life against a real store: not started, waiting, drained, closed, its process ended."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvsieve_store.arena import Arena
from kvsieve_store.client import (
    AdminClient,
    ArenaMap,
    ClientState,
    Match,
    StoreClient,
)
from kvsieve_store.errors import (
    UnavailableError,
)
from tests.protocol.client_stores import (
    SPEC,
    chain,
    client,
    store_thread,
    until,
    write_chain,
)

pytestmark = pytest.mark.usefixtures("empty")


def test_close_gives_everything_back(endpoint: str) -> None:
    with AdminClient(endpoint) as admin:
        c = client(endpoint)
        write_chain(c, chain(2))
        pending: list[Future[Match]] = [c.match_async(chain(2)) for _ in range(5)]
        c.close()
        c.close()
        assert c.state == ClientState.CLOSED
        for future in pending:
            assert future.exception(0) is None or isinstance(future.exception(0), UnavailableError)
        with pytest.raises(UnavailableError, match="closed"):
            c.match(chain(2))
        with pytest.raises(UnavailableError, match="closed"):
            c.start()
        assert c.take_credits(1) == []
        until(lambda: not admin.list_sessions().sessions)
        (pool,) = admin.list_pools().pools
        assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 2)


def test_leases_stay_while_a_process_holds_the_lock(endpoint: str) -> None:
    with AdminClient(endpoint) as admin:
        c = client(endpoint)
        write_chain(c, chain(2))
        with ArenaMap(c.wait_attached(0)):
            c.match(chain(2))
            c.close()
            until(lambda: [s.state for s in admin.list_sessions().sessions] == ["fencing"])
            assert admin.list_pools().pools[0].leased_blocks == 2
        until(lambda: admin.list_pools().pools[0].leased_blocks == 0)


def test_a_client_that_was_not_started_says_so(endpoint: str) -> None:
    c = StoreClient(endpoint, SPEC, engine_id="test")
    assert c.state == ClientState.CONNECTING
    assert (c.credits, c.take_credits(1), c.attachment, c.error) == (0, [], None, None)
    with pytest.raises(UnavailableError, match="not started"):
        c.match(chain(1))
    c.close()
    assert c.state == ClientState.CLOSED


def test_a_callback_cannot_wait(endpoint: str) -> None:
    said: list[str] = []

    def wait(_: str) -> None:
        for call in (lambda: c.match(chain(1)), c.close):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))

    c = StoreClient(endpoint, SPEC, engine_id="test", on_change=wait)
    with c:
        c.wait_attached(20)
    assert said[:2] == [
        "a callback can't wait for an answer: use the *_async methods",
        "a callback can't close its client",
    ]


def test_a_store_that_prefaults_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prefaulted = threading.Event()

    def prefault(_: Arena, progress: Callable[[float], None], stop: threading.Event) -> None:
        progress(0.4)
        prefaulted.wait(60)

    monkeypatch.setattr(Arena, "prefault", prefault)
    changes: list[str] = []
    with (
        store_thread(wait=False) as endpoint,
        StoreClient(endpoint, SPEC, engine_id="early", on_change=changes.append) as c,
    ):
        until(lambda: "prefault" in str(c.error))
        assert c.state == ClientState.CONNECTING
        with pytest.raises(UnavailableError, match=r"not attached after 0\.1 s: .*prefault"):
            c.wait_attached(0.1)
        prefaulted.set()
        c.wait_attached(20)
    assert changes == ["attached", "closed"]


def test_a_drain_is_told() -> None:
    changes: list[str] = []
    with (
        store_thread() as drained,
        AdminClient(drained) as admin,
        StoreClient(drained, SPEC, engine_id="test", on_change=changes.append) as c,
    ):
        c.wait_attached(20)
        assert admin.drain(timeout_ms=1).leases_left == 0
        until(lambda: "connecting" in changes)
        assert c.attachment is None
    assert changes == ["attached", "draining", "connecting", "closed"]


LEAVE_NOTHING = """
import os, pickle, sys, threading
from kvsieve_store.client import StoreClient
endpoint, spec = pickle.loads(sys.stdin.buffer.read())
def held():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    sockets = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in sockets if "socket:" in name or ".lock" in name]
before = held()
for _ in range(2):
    client = StoreClient(endpoint, spec, engine_id="leaver")
    client.start()
    client.wait_attached(20)
    client.match(bytes(range(32)))
    client.close()
print([thread.name for thread in threading.enumerate()], [name for name in held() if name not in before])
"""


FORK_FIRST = """
import os, pickle, sys
from kvsieve_store.client import StoreClient
endpoint, spec = pickle.loads(sys.stdin.buffer.read())
client = StoreClient(endpoint, spec, engine_id="forked")
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    client.start()
    client.wait_attached(20)
    sys.exit(4 if client.credits else 5)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(LEAVE_NOTHING, "['MainThread'] []", id="close leaves no thread, socket or lock"),
        pytest.param(FORK_FIRST, "4", id="start after a fork, no close before the exit"),
    ],
)
def test_processes_end_well(endpoint: str, code: str, printed: str) -> None:
    sent = pickle.dumps((endpoint, SPEC))
    ran = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, timeout=60)
    assert (ran.stdout.decode().strip(), ran.returncode) == (printed, 0), ran.stderr.decode()
