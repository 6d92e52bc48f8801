"""The client against a real store: every verb, both faces, several clients and processes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

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
    client,
    entries,
    key,
    store_thread,
    until,
    write_chain,
)

pytestmark = pytest.mark.usefixtures("empty")


READER = """
import pickle, sys
from kvsieve_store.client import ArenaMap, StoreClient
endpoint, spec, keys = pickle.loads(sys.stdin.buffer.read())
with StoreClient(endpoint, spec, engine_id="reader", credit_target=0) as client:
    with ArenaMap(client.wait_attached(20)) as arena:
        match = client.match(keys)
        sys.stdout.buffer.write(b"".join(arena.slot(ref.slot).tobytes() for ref in match.refs))
"""


def test_what_is_announced_is_found_once_it_is_sealed(endpoint: str) -> None:
    keys = chain(3)
    with client(endpoint) as writer:
        refs = writer.take_credits(3)
        batch = entries(keys, refs)
        writer.announce(batch)
        assert not writer.match(keys).refs
        with pytest.raises(SlotNotHeldError, match=r"slots\[0\]"):
            writer.announce([SealEntry(key(9), b"", SlotRef(10**6, 1)), *batch])
        with pytest.raises(InvalidRequestError, match=r"entries\[0\].key"):
            writer.announce([SealEntry(b"short", b"", refs[0])])
        with pytest.raises(UnavailableError, match="epoch"):
            writer.announce(batch, epoch=99)
        assert writer.seal(batch) == [SealResult.SEALED] * 3
        assert writer.match(keys).refs == tuple(refs)


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
        with pytest.raises(InvalidRequestError, match=r"entries\[0\]\.ref\.slot: -1 given"):
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
