"""Blocks that are being written: what finds them, what ends that, and what keeps their slots."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import NotFoundError
from kvsieve_store.state import Grant, StoreState
from tests.unit.state_driver import Engine, attach, has, key, keys, settings, spec, u32


class Scene:
    """A writer with three slots, announced as blocks 1 to 3 behind a sealed block 0, and a reader."""

    def __init__(self) -> None:
        self.state = StoreState(settings(extents=2))
        self.writer = attach(self.state, name="writer")
        self.reader = attach(self.state, name="reader")
        self.writer.save(0)
        self.grant = self.writer.reserve(3)
        self.announce(1, 2, 3)
        self.pool_id = spec().pool_id()

    def announce(self, *numbers: int, engine: Engine | None = None, grant: Grant | None = None) -> None:
        grant, count = grant or self.grant, len(numbers)
        slots, generations = grant.slots[:count], grant.generations[:count]
        self.state.announce((engine or self.writer).id, keys(*numbers), slots, generations, 0.0)

    def coming(self, *numbers: int, most: int = 9) -> tuple[int, list[int], int]:
        """Sealed blocks, slots of coming ones, and the lease of both."""
        match, coming = self.state.match_coming(self.reader.id, keys(*numbers), 60_000, most, 0.0)
        return len(match.slots), coming.slots.tolist(), match.lease_id

    def regranted(self) -> set[int]:
        """Slots that somebody who takes all there are can get."""
        return set(self.reader.reserve(100).slots.tolist())


def test_only_those_who_ask_for_them_find_them_behind_what_is_sealed() -> None:
    scene = Scene()
    slots = scene.grant.slots.tolist()
    assert scene.coming(0, 1, 2, 3)[:2] == (1, slots)
    assert scene.coming(0, 1, 2, 3, most=2)[:2] == (1, slots[:2])
    assert scene.coming(0, 2, 9, 3)[:2] == (1, slots[1:2])
    assert scene.coming(9, 1)[:2] == (0, [])
    assert len(scene.reader.match(0, 1, 2).slots) == 1
    assert not scene.state.has(scene.pool_id, key(1))
    assert scene.state.is_coming(scene.pool_id, key(1))
    assert not scene.state.is_coming(bytes(32), key(1))


def test_a_seal_makes_it_a_block_and_its_lease_goes_on() -> None:
    scene = Scene()
    _, slots, lease = scene.coming(1, 2, 3)
    scene.writer.seal(scene.grant, keys(1, 2))
    assert scene.state.progress(scene.pool_id, keys(1, 2, 3), u32(*slots)) == (2, 3)
    assert not scene.state.is_coming(scene.pool_id, key(1))
    scene.state.clear("pool")
    assert (has(scene.state, 0), has(scene.state, 1), has(scene.state, 2)) == (False, True, True)
    scene.reader.release(lease)
    scene.state.clear("pool")
    assert not has(scene.state, 1)


@pytest.mark.parametrize(
    "how", ["released", "the session ends", "sealed under another key", "sealed elsewhere"]
)
def test_it_ends_and_its_slot_stays_as_it_is_while_it_is_leased(how: str) -> None:
    scene = Scene()
    _, slots, lease = scene.coming(1, 2, 3)
    other = scene.coming(1, 2, 3)[2]
    if how == "released":
        scene.writer.release(grant=scene.grant)
    elif how == "the session ends":
        scene.state.end_session(scene.writer.id, 0.0)
        assert scene.coming(1, 2, 3)[:2] == (0, [])  # nobody will seal it
        scene.state.fenced(scene.writer.id)
    elif how == "sealed under another key":
        scene.writer.seal(scene.grant, keys(7, 8, 9))
        scene.state.clear("pool")
    else:
        scene.reader.save(1, 2, 3)
        scene.writer.seal(scene.grant, keys(1, 2, 3))  # duplicates: the slots are given back
    assert scene.coming(1, 2, 3)[1] == []
    assert scene.state.progress(scene.pool_id, keys(1, 2, 3), u32(*slots)) == (0, 0)
    assert not scene.regranted() & set(slots)
    scene.reader.release(lease)
    assert not scene.regranted() & set(slots)
    scene.reader.release(other)
    scene.state.clear("pool")
    assert scene.regranted() >= set(slots)


def test_the_first_writer_of_a_key_stays_and_a_slot_has_its_last_key() -> None:
    scene = Scene()
    second = attach(scene.state, name="second")
    grant = second.reserve(3)
    scene.announce(1, 0, 5, engine=second, grant=grant)
    first, third = scene.grant.slots.tolist()[0], grant.slots.tolist()[2]
    assert (scene.coming(1)[1], scene.coming(5)[1], scene.coming(0)[:2]) == ([first], [third], (1, []))
    scene.announce(4)
    assert (scene.coming(1)[1], scene.coming(4)[1]) == ([], [first])


def test_an_ended_session_announces_nothing() -> None:
    scene = Scene()
    scene.state.end_session(scene.writer.id, 0.0)
    with pytest.raises(NotFoundError):
        scene.announce(1)
    assert scene.coming(1)[1] == []


@pytest.mark.parametrize("announced", [False, True])
def test_a_full_store_in_which_all_was_used_keeps_what_was_announced_for_a_while(announced: bool) -> None:
    """Whoever comes for it has not been there yet; older blocks go before it."""
    state = StoreState(settings(extents=2))
    writer, reader = attach(state, name="writer"), attach(state, name="reader")
    everything = writer.reserve(1000)
    writer.release(grant=everything)
    used = range(100, 100 + len(everything) - 3)
    for number in used:
        writer.save(number)
        reader.match(number)
    grant = writer.reserve(3)
    if announced:
        state.announce(writer.id, keys(1, 2, 3), grant.slots, grant.generations, 0.0)
    writer.seal(grant, keys(1, 2, 3))
    assert len(writer.reserve(3)) == 3
    assert [has(state, number) for number in (1, 2, 3)] == [announced] * 3


def full_store(hold_ms: int) -> tuple[StoreState, Engine, Grant]:
    """All of it held by one writer, three slots announced as blocks 1 to 3 and sealed."""
    state = StoreState(settings(extents=2))
    writer = attach(state, name="writer")
    everything = writer.reserve(1000)
    slots, generations = everything.slots[:3], everything.generations[:3]
    state.announce(writer.id, keys(1, 2, 3), slots, generations, 0.0, hold_ms)
    writer.seal(everything, keys(1, 2, 3))
    for number in (1, 2, 3):
        writer.match(number)
    return state, writer, everything


def there(state: StoreState) -> list[bool]:
    return [has(state, number) for number in (1, 2, 3)]


def test_blocks_that_were_announced_with_a_hold_stay_until_they_are_taken() -> None:
    state, writer, _ = full_store(60_000)
    assert len(writer.reserve(3)) == 0
    state.clear("pool")
    assert state.evict("pool", keys(1), 0, 0.0).evicted == 0
    assert there(state) == [True] * 3
    state.taken(spec().pool_id(), keys(9, 2, 2))
    assert len(writer.reserve(3)) == 1
    assert there(state) == [True, False, True]
    state.taken(bytes(32), keys(1))
    state.taken(spec().pool_id(), keys(1, 2, 3))
    assert len(writer.reserve(3)) == 2


def test_without_a_hold_they_may_go() -> None:
    state, writer, _ = full_store(0)
    assert len(writer.reserve(3)) == 3
    assert there(state) == [False] * 3


def test_a_hold_ends_with_its_time() -> None:
    state, writer, _ = full_store(5_000)
    state.tick(4.9)
    assert len(writer.reserve(1)) == 0
    state.tick(5.0)
    assert len(writer.reserve(3)) == 3


def test_a_hold_ends_with_the_session_that_announced_it() -> None:
    state, writer, _ = full_store(600_000)
    other = attach(state, name="other")
    state.end_session(writer.id, 0.0)
    assert len(other.reserve(3)) == 3


def test_a_hold_is_on_whichever_slot_is_sealed_under_the_key() -> None:
    scene = Scene()
    scene.state.announce(
        scene.writer.id, keys(8), scene.grant.slots[:1], scene.grant.generations[:1], 0.0, 60_000
    )
    scene.reader.save(8)
    scene.state.clear("pool")
    assert has(scene.state, 8)
    scene.state.end_session(scene.reader.id, 0.0)
    scene.state.clear("pool")
    assert has(scene.state, 8)  # the writer's hold
    scene.state.end_session(scene.writer.id, 0.0)
    scene.state.clear("pool")
    assert not has(scene.state, 8)
