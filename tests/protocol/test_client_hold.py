"""Seals that hold: what the client leases, keeps, renews and gives back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from kvsieve_store.client import (
    AdminClient,
    AsyncStoreClient,
    Held,
    SealEntry,
    SealResult,
    SlotRef,
    StoreClient,
)
from kvsieve_store.errors import CapacityError, InvalidRequestError, SlotNotHeldError, UnavailableError
from tests.protocol.client_stores import SPEC, chain, client, entries, key, until, write_chain

pytestmark = pytest.mark.usefixtures("empty")

SEALED, DUPLICATE = SealResult.SEALED, SealResult.DUPLICATE


def held_and_leased(admin: AdminClient) -> tuple[int, int]:
    """Slots and leases of the first session."""
    session = admin.list_sessions().sessions[0]
    return session.held_slots, session.leases


def split_seals(c: StoreClient) -> None:
    """Cuts what follows into messages of three, as if the store had said so."""
    assert c._core._session is not None
    c._core._session._limits.max_batch = 3


def test_what_is_sealed_is_leased_and_duplicates_stay(endpoint: str) -> None:
    with client(endpoint, credit_target=4) as c, client(endpoint) as other, AdminClient(endpoint) as admin:
        write_chain(other, chain(2))
        refs = c.take_credits(3)
        made = entries(chain(3), refs)
        held = c.seal(made, hold=True)
        assert held.results == [DUPLICATE, DUPLICATE, SEALED]
        assert (len(held.lease_ids), held.epoch) == (1, c.wait_attached(0).epoch)
        assert held.kept(made) == refs[:2]
        assert c.credits == 2  # four are held, two of them by the caller
        assert held_and_leased(admin) == (4, 1)
        assert c.match(chain(3)).refs[2] == refs[2]
        c.release(held.lease_ids, held.kept(made), epoch=held.epoch)
        until(lambda: c.credits == 4)
        assert held_and_leased(admin) == (4, 1)  # the match's


def test_a_seal_without_hold_leases_nothing(endpoint: str) -> None:
    with client(endpoint) as c, AdminClient(endpoint) as admin:
        assert c.seal(entries(chain(2), c.take_credits(2))) == [SEALED, SEALED]
        assert admin.status().leases == 0


@pytest.mark.parametrize(("hold", "lease"), [(False, 7), (True, -1), (True, 1 << 64)])
def test_a_lease_that_can_not_be_meant(endpoint: str, hold: bool, lease: int) -> None:
    with client(endpoint) as c, pytest.raises(InvalidRequestError, match=f"lease: {lease} given"):
        c.seal([], hold=hold, lease=lease)  # type: ignore[call-overload]


def test_nothing_to_seal(endpoint: str) -> None:
    with client(endpoint) as c:
        assert c.seal([], hold=True) == Held()
        assert c.seal([]) == []


def test_leases_of_seals_are_renewed(endpoint: str) -> None:
    with client(endpoint, lease_ms=1_500) as c, AdminClient(endpoint) as admin:
        held = c.seal(entries(chain(2), c.take_credits(2)), hold=True)
        # Twice the length of the lease; the heartbeat goes out in a third of it.
        threading.Event().wait(3)
        assert admin.status().leases == 1
        c.release(held.lease_ids, epoch=held.epoch)
        assert admin.status().leases == 0


def test_a_client_without_leases_can_hold_nothing(endpoint: str) -> None:
    with client(endpoint, lease_ms=0) as c:
        refs = c.take_credits(1)
        with pytest.raises(InvalidRequestError, match=r"hold: .*lease_ms"):
            c.seal(entries(chain(1), refs), hold=True)
        assert c.seal(entries(chain(1), refs)) == [SEALED]


def test_held_blocks_outlast_pressure(endpoint: str) -> None:
    """The arena holds 480 slots: three times as many are written, and the held chain is still there."""
    with client(endpoint, credit_target=64) as c:
        refs = c.take_credits(20)
        held = c.seal(entries(chain(20), refs), hold=True)
        for n in range(1, 24):
            write_chain(c, chain(60, start=1000 * n))
        assert c.match(chain(20)).refs == tuple(refs)
        c.release(held.lease_ids)


def test_a_cancelled_hold_leaves_nothing_held(endpoint: str) -> None:
    with client(endpoint, credit_target=0) as c, AdminClient(endpoint) as admin:
        c.reserve(60)
        write_chain(c, chain(30))
        futures = [c.seal_async(entries(chain(2, start=n), c.take_credits(1)), hold=True) for n in range(30)]
        answered = [future for future in futures if not future.cancel()]
        for future in answered:
            held = future.result()
            c.release(held.lease_ids, (), epoch=held.epoch)
        until(lambda: held_and_leased(admin) == (len(answered), 0))


def test_a_hold_that_fails_half_way_leaves_nothing_held(endpoint: str) -> None:
    """Two messages: the first is sealed and leased, the second refused."""
    with client(endpoint, credit_target=0) as c, AdminClient(endpoint) as admin:
        assert c.reserve(400) == 400
        write_chain(c, chain(1))
        split_seals(c)
        refs = c.take_credits(5)
        bad = [*refs[:4], SlotRef(refs[4].slot, 99)]
        with pytest.raises(SlotNotHeldError, match=r"generations\[1\]"):
            c.seal(entries(chain(5), bad), hold=True)
        until(lambda: held_and_leased(admin) == (396, 0))
        c.release(refs=refs[3:])
        assert c.match(chain(5)).refs[1:] == tuple(refs[1:3])


def test_a_hold_over_the_limit_of_leases_seals_nothing(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsieve_store.state.leases.MAX_LEASES", 1)
    with client(endpoint) as c:
        first = c.seal(entries(chain(1), c.take_credits(1)), hold=True)
        refs = c.take_credits(1)
        with pytest.raises(CapacityError, match="lease_ms: the session has 1 leases, the most"):
            c.seal(entries(chain(1, start=1), refs), hold=True)
        c.release(first.lease_ids)
        assert c.seal(entries(chain(1, start=1), refs), hold=True).results == [SEALED]


def test_a_long_hold_in_several_messages_is_one_lease(endpoint: str) -> None:
    with client(endpoint, credit_target=0) as c, AdminClient(endpoint) as admin:
        c.reserve(7)
        split_seals(c)
        held = c.seal(entries(chain(7), c.take_credits(7)), hold=True)
        assert (held.results, len(held.lease_ids)) == ([SEALED] * 7, 1)
        assert held_and_leased(admin) == (0, 1)
        c.release(held.lease_ids)
        assert admin.status().leases == 0


def renewed(c: StoreClient) -> set[int]:
    """The leases that go out with each heartbeat."""
    assert c._core._session is not None
    return c._core._session.leases


def test_who_holds_more_and_more_has_one_lease_to_renew(endpoint: str) -> None:
    """A match, then a block at a time: one lease at the store, and one on the wire, whatever the blocks."""
    with client(endpoint, lease_ms=1_500) as c, AdminClient(endpoint) as admin:
        write_chain(c, chain(2))
        (lease,) = c.match(chain(2)).lease_ids
        for n in range(2, 12):
            (ref,) = c.take_credits(1)
            held = c.seal([SealEntry(key(n), key(n - 1), ref)], hold=True, lease=lease)
            assert (held.results, held.lease_ids) == ([SEALED], (lease,))
        assert (held_and_leased(admin)[1], renewed(c)) == (1, {lease})
        # Twice the length of the lease; the heartbeat goes out in a third of it.
        threading.Event().wait(3)
        assert admin.list_pools().pools[0].leased_blocks == 12
        c.release([lease])
        assert (admin.list_pools().pools[0].leased_blocks, renewed(c)) == (0, set())


def test_a_lease_that_is_gone_is_made_anew(endpoint: str) -> None:
    with client(endpoint) as c:
        write_chain(c, chain(1))
        (lease,) = c.match(chain(1)).lease_ids
        c.release([lease])
        held = c.seal(entries(chain(1, start=1), c.take_credits(1)), hold=True, lease=lease)
        (other,) = held.lease_ids
        assert (other != lease, renewed(c)) == (True, {other})


def test_a_hold_that_fails_keeps_the_lease_that_it_was_given(endpoint: str) -> None:
    """Two messages: the first is sealed into the lease, the second refused. What is in the lease stays."""
    with client(endpoint, credit_target=0) as c, AdminClient(endpoint) as admin:
        assert c.reserve(10) == 10
        write_chain(c, chain(1))
        (lease,) = c.match(chain(1)).lease_ids
        split_seals(c)
        refs = c.take_credits(5)
        bad = [*refs[:4], SlotRef(refs[4].slot, 99)]
        with pytest.raises(SlotNotHeldError):
            c.seal(entries(chain(5, start=1), bad), hold=True, lease=lease)
        assert admin.list_pools().pools[0].leased_blocks == 4
        c.release([lease], refs[3:])
        assert held_and_leased(admin) == (4, 0)
        assert admin.list_pools().pools[0].leased_blocks == 0


def test_a_cancelled_hold_leaves_what_it_added_to_its_lease(endpoint: str) -> None:
    with client(endpoint, credit_target=0) as c, AdminClient(endpoint) as admin:
        c.reserve(40)
        write_chain(c, chain(1))
        (lease,) = c.match(chain(1)).lease_ids
        for n in range(1, 31):
            c.seal_async(entries(chain(1, start=n), c.take_credits(1)), hold=True, lease=lease).cancel()
        c.match(chain(1))  # the seals' answers are in
        until(lambda: held_and_leased(admin)[1] == 2)
        assert lease in renewed(c)
        c.release([lease])
        until(lambda: admin.list_pools().pools[0].leased_blocks == 1)


def test_the_end_of_the_client_lets_go(endpoint: str) -> None:
    with AdminClient(endpoint) as admin:
        c = client(endpoint)
        write_chain(c, chain(1))
        c.seal(entries(chain(2), c.take_credits(2)), hold=True)
        c.close()
        with pytest.raises(UnavailableError):
            c.seal(entries(chain(1), [SlotRef(0, 1)]), hold=True)
        until(lambda: not admin.list_sessions().sessions)
        (pool,) = admin.list_pools().pools
        assert (pool.writing_slots, pool.leased_blocks, pool.sealed_blocks) == (0, 0, 2)


def test_a_stale_epoch_is_refused(endpoint: str) -> None:
    with client(endpoint) as c, pytest.raises(UnavailableError, match=r"epoch: 7 given"):
        c.seal(entries(chain(1), c.take_credits(1)), epoch=7, hold=True)


def test_coroutines_hold_alike(endpoint: str) -> None:
    async def through_coroutines() -> None:
        c = AsyncStoreClient(endpoint, SPEC, engine_id="async", credit_target=4)
        c.start()
        await c.wait_attached(20)
        refs = c.take_credits(3)
        held = await c.seal(entries(chain(2), refs), hold=True)
        assert (held.results, len(held.lease_ids), held.epoch) == ([SEALED, SEALED], 1, 1)
        again = await c.seal(entries(chain(1), refs[2:]), hold=True)
        assert (again.results, again.lease_ids) == ([DUPLICATE], ())
        await c.release((), again.kept(entries(chain(1), refs[2:])))

        task = asyncio.ensure_future(c.seal(entries(chain(1), c.take_credits(1)), hold=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await c.release(held.lease_ids)
        with AdminClient(endpoint) as admin:
            while admin.status().leases:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)
        await c.close()

    asyncio.run(through_coroutines())


def test_attachment_tells_how_many_slots_the_pool_could_have(endpoint: str) -> None:
    with client(endpoint, credit_target=0) as c:
        attachment = c.wait_attached(0)
        assert attachment.slots == 32 * attachment.slots_per_extent == 480
        assert c.reserve(10_000) == attachment.slots
    uneven = replace(
        attachment, segments=(("/a", 4 * attachment.extent_bytes), ("/b", 3 * attachment.extent_bytes))
    )
    assert uneven.slots == 7 * attachment.slots_per_extent
