"""The client against a real store: every verb, both faces, several clients and processes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kvsieve_store.arena import Arena
from kvsieve_store.client import (
    AdminClient,
    ArenaMap,
    AsyncStoreClient,
    ClientState,
    Match,
    SealEntry,
    SealResult,
    SlotRef,
    StoreClient,
)
from kvsieve_store.errors import (
    InvalidRequestError,
    PoolMismatchError,
    SlotNotHeldError,
    UnavailableError,
)
from tests.protocol.client_stores import (
    SPEC,
    chain,
    entries,
    key,
    store_thread,
    until,
    write_chain,
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with store_thread() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def _empty(endpoint: str) -> None:
    """Every test begins with an empty store."""
    with AdminClient(endpoint) as admin:
        until(lambda: admin.status().sessions == 0 and not admin.list_sessions().sessions)
        admin.clear()


def client(endpoint: str, **options: Any) -> StoreClient:
    """An attached client; its credits are few against the 480 slots of the arena."""
    started = StoreClient(endpoint, SPEC, **({"engine_id": "test", "credit_target": 16} | options))
    started.start()
    started.wait_attached(20)
    return started


READER = """
import pickle, sys
from kvsieve_store.client import ArenaMap, StoreClient
endpoint, spec, keys = pickle.loads(sys.stdin.buffer.read())
with StoreClient(endpoint, spec, engine_id="reader", credit_target=0) as client:
    with ArenaMap(client.wait_attached(20)) as arena:
        match = client.match(keys)
        sys.stdout.buffer.write(b"".join(arena.slot(ref.slot).tobytes() for ref in match.refs))
"""


def test_blocks_come_back_through_another_client_and_another_process(endpoint: str) -> None:
    keys = chain(3)
    with client(endpoint) as writer, ArenaMap(writer.wait_attached(0)) as arena:
        refs = writer.take_credits(3)
        for n, ref in enumerate(refs, 1):
            assert arena.generation(ref.slot) == ref.generation
            arena.slot(ref.slot)[:] = n
            arena.set_layers_done(ref.slot, 0, 4)
        assert writer.seal(entries(keys, refs)) == [SealResult.SEALED] * 3
        expected = b"".join(arena.slot(ref.slot).tobytes() for ref in refs)

        with client(endpoint) as reader, ArenaMap(reader.wait_attached(0)) as other:
            match = reader.match([*keys, key(99)])
            assert match.refs == tuple(refs)
            assert b"".join(other.slot(ref.slot).tobytes() for ref in match.refs) == expected
            assert [other.layers_done(ref.slot, 0) for ref in match.refs] == [4, 4, 4]

        sent = pickle.dumps((endpoint, SPEC, b"".join(keys)))
        read = subprocess.run([sys.executable, "-c", READER], input=sent, stdout=subprocess.PIPE, check=True)
        assert read.stdout == expected


def test_credits_replenish(endpoint: str) -> None:
    with client(endpoint, credit_target=4) as c:
        for n in range(10):
            assert c.credits == 4
            refs = c.take_credits(100)
            assert len(refs) == 4
            assert c.take_credits(1) == []
            c.seal(entries(chain(4, start=4 * n), refs))
        assert len(c.match(chain(4)).refs) == 4


def test_credits_that_are_given_back_are_granted_anew(endpoint: str) -> None:
    with client(endpoint, credit_target=4) as c:
        refs = c.take_credits(4)
        c.release(refs=refs)
        until(lambda: c.credits == 4)
        with pytest.raises(SlotNotHeldError, match="slot"):
            c.seal(entries(chain(1), refs))


def test_reserve_brings_credits_beyond_the_target(endpoint: str) -> None:
    with client(endpoint, credit_target=2) as c:
        assert c.reserve(30) == 30
        assert c.credits == 32
        assert c.reserve(100_000) < 100_000


def test_duplicates_are_told(endpoint: str) -> None:
    with client(endpoint) as one, client(endpoint) as other:
        write_chain(one, chain(2))
        refs = other.take_credits(3)
        results = other.seal(entries(chain(3), refs))
        assert results == [SealResult.DUPLICATE, SealResult.DUPLICATE, SealResult.SEALED]
        assert other.match(chain(3)).refs[2] == refs[2]


def test_a_match_ends_at_the_first_gap(endpoint: str) -> None:
    with client(endpoint) as c:
        write_chain(c, chain(5))
        assert len(c.match([*chain(2), key(1000), *chain(2, start=3)]).refs) == 2
        assert c.match(key(1000)) == Match((), (), 1)
        assert c.match(b"") == c.match([]) == Match()


def test_held_leases_are_renewed_and_released(endpoint: str) -> None:
    with client(endpoint, lease_ms=1_500) as c, AdminClient(endpoint) as admin:
        write_chain(c, chain(3))
        kept, dropped = c.match(chain(3)), c.match(chain(2))
        assert admin.status().leases == 2
        c.release(dropped.lease_ids, epoch=dropped.epoch)
        assert admin.status().leases == 1
        # Twice the length of the lease; the heartbeat goes out in a third of it.
        threading.Event().wait(3)
        assert admin.status().leases == 1
        c.release(kept.lease_ids)
        assert admin.status().leases == 0


def test_no_lease_when_none_is_asked_for(endpoint: str) -> None:
    with client(endpoint, lease_ms=0) as c, AdminClient(endpoint) as admin:
        write_chain(c, chain(2))
        match = c.match(chain(2))
        assert (len(match.refs), match.lease_ids) == (2, ())
        assert admin.status().leases == 0


def test_a_cancelled_match_leaves_no_lease(endpoint: str) -> None:
    with client(endpoint) as c, AdminClient(endpoint) as admin:
        write_chain(c, chain(2))
        futures = [c.match_async(chain(2)) for _ in range(50)]
        cancelled = [future.cancel() for future in futures]
        held = [f.result() for f, gone in zip(futures, cancelled, strict=True) if not gone]
        until(lambda: admin.status().leases == len(held))


def test_messages_beyond_the_limits_are_split(endpoint: str) -> None:
    """More keys than one Match may hold, more slots than one Seal or Release may."""
    with store_thread(pool_size=64 << 20) as large:
        spec = replace(SPEC, planes=(replace(SPEC.planes[0], layer_bytes=(4096,)),))
        with StoreClient(large, spec, engine_id="test", credit_target=0) as c:
            c.wait_attached(20)
            assert c.reserve(9_000) == 9_000
            refs = c.take_credits(9_000)
            keys = chain(9_000)
            assert set(c.seal(entries(keys[:4_500], refs[:4_500]))) == {SealResult.SEALED}
            c.release(refs=refs[4_500:])
            match = c.match(keys + chain(30_000, start=9_000))
            assert match.refs == tuple(refs[:4_500])


def test_a_stale_epoch_is_refused(endpoint: str) -> None:
    with client(endpoint) as c:
        epoch = c.wait_attached(0).epoch
        assert c.take_credits(2, epoch=epoch + 1) == []
        refs = c.take_credits(2, epoch=epoch)
        with pytest.raises(UnavailableError, match=r"epoch: 7 given"):
            c.seal(entries(chain(1), refs), epoch=7)
        with pytest.raises(UnavailableError, match=r"epoch: 0 given"):
            c.release(refs=refs, epoch=0)
        assert c.seal(entries(chain(2), refs), epoch=epoch) == [SealResult.SEALED] * 2


def test_bad_input_is_named(endpoint: str) -> None:
    with client(endpoint) as c:
        (ref,) = c.take_credits(1)
        with pytest.raises(InvalidRequestError, match=r"keys: 33 bytes given, a multiple of 32 required"):
            c.match(bytes(33))
        with pytest.raises(InvalidRequestError, match=r"keys\[1\]: 31 bytes given"):
            c.match([key(1), bytes(31)])
        with pytest.raises(InvalidRequestError, match=r"entries\[0\]\.key: 1 bytes given"):
            c.seal([SealEntry(b"x", b"", ref)])
        with pytest.raises(InvalidRequestError, match=r"entries\[0\]\.parent: 2 bytes given"):
            c.seal([SealEntry(key(1), b"xx", ref)])
        with pytest.raises(InvalidRequestError, match=r"SealRequest: .*-1"):
            c.seal([SealEntry(key(1), b"", SlotRef(-1, 1))])
        with pytest.raises(InvalidRequestError, match="count: 0 given"):
            c.reserve(0)
        with pytest.raises(SlotNotHeldError, match="slot"):
            c.seal([SealEntry(key(1), b"", SlotRef(ref.slot, ref.generation + 1))])
        assert c.seal([SealEntry(key(1), b"", ref)]) == [SealResult.SEALED]


@pytest.mark.parametrize(
    "options", [{"credit_target": -1}, {"credit_target": 1 << 32}, {"lease_ms": 99}, {"timeout": 0}]
)
def test_a_bad_option_is_named(endpoint: str, options: dict[str, int]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InvalidRequestError, match=f"^{name}: {value} given"):
        StoreClient(endpoint, SPEC, **({"engine_id": "test"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://host:1", "expected unix:///path or host:port"),
        ("unix:relative", "absolute path"),
        ("unix:///" + "x" * 200, "at most 107 bytes"),
        ("localhost", "expected unix:///path or host:port"),
        ("localhost:0", "port 0 given"),
        ("", "expected unix:///path or host:port"),
    ],
)
def test_a_bad_endpoint_is_named(given: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^endpoint: .*({said})"):
        StoreClient(given, SPEC, engine_id="test")


def test_tcp(endpoint: str, unused_port: int) -> None:
    with store_thread(listen=(f"127.0.0.1:{unused_port}",)):
        for scheme in ("", "tcp://"):
            with client(f"{scheme}127.0.0.1:{unused_port}") as c:
                write_chain(c, chain(1))
                assert len(c.match(chain(1)).refs) == 1


def test_another_spec_under_the_name_is_refused_with_both_values(endpoint: str) -> None:
    changes: list[str] = []
    with client(endpoint):
        other = replace(SPEC, dtype="float16", block_tokens=32)
        with StoreClient(endpoint, other, engine_id="other", on_change=changes.append) as c:
            with pytest.raises(PoolMismatchError) as refusal:
                c.wait_attached(20)
            for part in ("dtype", "'float16'", "'bfloat16'", "block_tokens", "32", "16", "kvsieve clear"):
                assert part in str(refusal.value)
            assert c.state == ClientState.REFUSED
            assert str(c.error) == str(refusal.value)
            assert c.attachment is None
            with pytest.raises(UnavailableError, match="refused"):
                c.match(chain(1))
    assert changes == ["refused", "closed"]


def test_a_refused_client_attaches_once_the_reason_is_gone(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsieve_store.client.async_client.REFUSED_RETRY_SECONDS", 0.1)
    changes: list[str] = []
    holder = client(endpoint)
    with StoreClient(
        endpoint, replace(SPEC, dtype="float16"), engine_id="other", on_change=changes.append
    ) as c:
        until(lambda: c.state == ClientState.REFUSED)
        holder.close()
        until(lambda: c.state == ClientState.ATTACHED)
        assert c.error is None
    assert changes == ["refused", "attached", "closed"]


def test_a_bad_hello_is_refused(endpoint: str) -> None:
    with (
        StoreClient(endpoint, SPEC, engine_id="test", credit_target=1 << 20) as c,
        pytest.raises(InvalidRequestError, match="credit_target"),
    ):
        c.wait_attached(20)


def test_leased_blocks_outlast_pressure(endpoint: str) -> None:
    """The arena holds 480 slots: three times as many are written, and the leased chain is still there."""
    with client(endpoint, credit_target=64) as c, client(endpoint, credit_target=0) as reader:
        write_chain(c, chain(20))
        match = reader.match(chain(20))
        assert len(match.refs) == 20
        for n in range(1, 24):
            write_chain(c, chain(60, start=1000 * n))
        again = c.match(chain(20))
        assert again.refs == match.refs
        assert len(c.match(chain(60, start=1000)).refs) < 60
        for m, owner in ((match, reader), (again, c)):
            owner.release(m.lease_ids)


def test_both_faces_agree(endpoint: str) -> None:
    async def through_coroutines() -> list[object]:
        c = AsyncStoreClient(endpoint, SPEC, engine_id="async", credit_target=4)
        c.start()
        attachment = await c.wait_attached(20)
        refs = c.take_credits(2)
        seen: list[object] = [
            attachment.epoch,
            len(refs),
            await c.seal(entries(chain(2, start=10), refs)),
            (await c.match(chain(2, start=10))).refs == tuple(refs),
            c.credits,
            await c.reserve(3),
        ]
        await c.release((1,), c.take_credits(1))
        await c.close()
        await c.close()
        return [*seen, c.state, c.attachment]

    def through_threads() -> list[object]:
        with client(endpoint, credit_target=4) as c:
            refs = c.take_credits(2)
            seen: list[object] = [
                c.wait_attached(0).epoch,
                len(refs),
                c.seal(entries(chain(2, start=20), refs)),
                c.match(chain(2, start=20)).refs == tuple(refs),
                c.credits,
                c.reserve(3),
            ]
            c.release((1,), c.take_credits(1))
        c.close()
        return [*seen, c.state, c.attachment]

    assert asyncio.run(through_coroutines()) == through_threads()


def test_threads_share_a_client(endpoint: str) -> None:
    taken: list[SlotRef] = []
    errors: list[BaseException] = []

    def work(c: StoreClient, base: int) -> None:
        try:
            for n in range(20):
                refs = write_chain(c, chain(3, start=base + 3 * n))
                taken.extend(refs)
                match = c.match(chain(3, start=base + 3 * n))
                assert match.refs == tuple(refs)
                c.release_async(match.lease_ids, epoch=match.epoch)
        except BaseException as error:
            errors.append(error)

    with client(endpoint, credit_target=8) as c, AdminClient(endpoint) as admin:
        threads = [threading.Thread(target=work, args=(c, base)) for base in (10_000, 20_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(set(taken)) == 120
        until(lambda: admin.status().leases == 0)


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
