"""Engines that hold much of the arena: reservations far beyond the credits, against leases and one another.

The arena has 56 slots, an engine four credits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvsieve.v1 import admin_pb2 as admin
from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.server.store import Store

from .client_stores import chain, client, entries, store_thread
from .client_stores import until as settled
from .conftest import EXTENTS, SLOTS_PER_EXTENT, Engine, until

SLOTS = EXTENTS * SLOTS_PER_EXTENT
CREDITS = 4

Connect = Callable[[str], Engine]


async def reserve(engine: Engine, count: int) -> int:
    """More credits; returns how many came."""
    answer = await engine.store.Reserve(pb.ReserveRequest(session_id=engine.session_id, count=count))
    engine.take(answer.credits)
    return len(answer.credits.slots)


async def give_back(engine: Engine, count: int, *lease_ids: int) -> None:
    """Releases the first `count` credits, and leases."""
    refs = [engine.credits.pop(0) for _ in range(count)]
    request = pb.ReleaseRequest(session_id=engine.session_id, lease_ids=lease_ids)
    request.slots.extend(slot for slot, _ in refs)
    request.generations.extend(generation for _, generation in refs)
    released = await engine.store.Release(request)
    assert (released.slots, released.leases) == (count, len(lease_ids))


async def states(engine: Engine, *expected: str) -> bool:
    """Whether the store's sessions are in these states."""
    listed = await engine.admin.ListSessions(admin.ListSessionsRequest())
    return sorted(session.state for session in listed.sessions) == sorted(expected)


@pytest.fixture
async def other(store: Store, connect: Connect) -> Engine:
    """A second engine, without credits."""
    other = connect(store.endpoints[0])
    await other.attach(engine_id="other", credit_target=0)
    return other


async def test_a_session_may_hold_far_more_than_its_credits(engine: Engine) -> None:
    assert await reserve(engine, SLOTS * 6 // 10) == SLOTS * 6 // 10
    assert await reserve(engine, SLOTS) == SLOTS - CREDITS - SLOTS * 6 // 10
    assert await reserve(engine, 1) == 0
    assert len(set(engine.credits)) == SLOTS


async def test_blocks_that_nobody_reads_make_room_and_leased_ones_do_not(
    engine: Engine, other: Engine
) -> None:
    """20 blocks of the other engine, of which 12 are leased by their seal."""
    await reserve(other, 20)
    first = await other.seal_and_lease(*range(1, 13), lease_ms=60_000)
    await other.seal(*range(13, 21))
    assert await reserve(engine, SLOTS) == SLOTS - CREDITS - 12
    assert len((await engine.match(*range(1, 21))).slots) == 12
    await give_back(other, 0, first.lease_id)
    assert await reserve(engine, 5) == 5
    assert len((await engine.match(*range(1, 13))).slots) == 7


async def test_what_is_reserved_replaces_credits_until_it_is_used(engine: Engine) -> None:
    """Seals bring no credits while the session holds its target without them."""
    await reserve(engine, 30)
    answer = await engine.seal_and_lease(*range(1, 26), lease_ms=60_000)
    assert (len(answer.credits.slots), len(engine.credits)) == (0, 9)
    answer = await engine.seal_and_lease(*range(26, 33), lease_ms=60_000)
    assert (len(answer.credits.slots), len(engine.credits)) == (2, CREDITS)


async def test_surplus_goes_back_and_is_there_for_others(engine: Engine, other: Engine) -> None:
    await reserve(engine, SLOTS)
    assert await reserve(other, 10) == 0
    await give_back(engine, 30)
    assert await reserve(other, 40) == 30
    assert not set(engine.credits) & set(other.credits)
    await give_back(engine, SLOTS - 30)
    engine.take((await engine.receive()).credits)  # less than its target: the store grants it anew
    assert len(engine.credits) == CREDITS


@pytest.mark.parametrize("locked", [False, True])
async def test_the_end_of_a_session_gives_back_all_of_it(engine: Engine, other: Engine, locked: bool) -> None:
    await reserve(other, 2)
    await other.seal(1, 2)
    await reserve(engine, 40)
    held = await engine.seal_and_lease(1, 2, 3, 4, lease_ms=60_000)
    assert list(held.status) == [pb.SEAL_STATUS_DUPLICATE] * 2 + [pb.SEAL_STATUS_SEALED] * 2
    if locked:
        engine.lock()
    engine.stream.cancel()
    if locked:
        await until(lambda: states(other, "attached", "fencing"))
        # What the session held and leased stays, and the two blocks that its chain begins with.
        assert await reserve(other, SLOTS) == SLOTS - 44 - 2
        engine.unlock()
    await until(lambda: states(other, "attached"))
    assert len((await other.match(1, 2, 3, 4)).slots) == 4
    await reserve(other, SLOTS)
    assert len(set(other.credits)) == SLOTS


async def test_two_that_reserve_all_share_what_is_there_and_keep_what_they_lease(
    engine: Engine, other: Engine
) -> None:
    """Both ask in small steps at the same time, and both have blocks under lease."""
    mine, theirs = range(1, 9), range(11, 19)
    for each, blocks in ((engine, mine), (other, theirs)):
        await reserve(each, len(blocks))
        answer = await each.seal_and_lease(*blocks, lease_ms=60_000)
        assert answer.lease_id
    before = [await engine.match(*blocks) for blocks in (mine, theirs)]
    for each in (engine, other):
        each.credits.clear()  # counted below, by what comes
    steps = [reserve(each, 3) for _ in range(SLOTS) for each in (engine, other)]
    granted = sum(await asyncio.gather(*steps))
    assert granted == SLOTS - CREDITS - len(mine) - len(theirs)
    assert len(set(engine.credits + other.credits)) == granted
    assert min(len(engine.credits), len(other.credits)) > 0
    assert [await engine.match(*blocks) for blocks in (mine, theirs)] == before


def test_a_client_reserves_most_of_the_arena_and_gives_the_surplus_back() -> None:
    """60 % of 480 slots reserved, 16 more as credits."""
    with store_thread() as endpoint, client(endpoint) as c, client(endpoint, credit_target=0) as other:
        total = c.wait_attached(0).slots
        most = total * 6 // 10
        assert c.reserve(most) == most
        refs = c.take_credits(total)
        assert len(refs) == most + 16
        held = c.seal(entries(chain(100), refs), hold=True)
        assert c.credits == 0
        assert other.reserve(total) == total - most - 16
        c.release(refs=refs[100:])
        settled(lambda: c.credits == 16)
        assert other.reserve(total) == most - 100
        assert c.match(chain(100)).refs == tuple(refs[:100])
        c.release(held.lease_ids)
