"""Arenas of a worker: memory is mapped and pinned once per store and given up when it must be, locks are the
sessions'. With files, flocks and threads as in an engine; only the calls of CUDA are noted instead of made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsieve_connector import arenas as module
from kvsieve_connector.arenas import Arenas
from kvsieve_connector.copy.pinning import Pinnings
from kvsieve_store.client import ArenaMap
from kvsieve_store.errors import UnavailableError
from tests.protocol.client_stores import is_locked, until
from tests.unit.arena_files import EXTENT, ArenaFiles, mappings
from tests.unit.test_pinning import NotingRegistrar

SEGMENTS = (2 * EXTENT, EXTENT)


class StrictRegistrar(NotingRegistrar):
    """As CUDA, refuses to register an address twice."""

    def register(self, address: int, size: int) -> int:
        return 712 if address in self.registered else super().register(address, size)


class Worker:
    """What a worker half does of its arenas: maps, pins, leaves."""

    def __init__(self) -> None:
        self.registrar = StrictRegistrar()
        self.pinnings = Pinnings(self.registrar)
        self.arenas = Arenas(self.pinnings.let_go)

    def attach(self, store: ArenaFiles) -> ArenaMap:
        """The arena of a new session, pinned."""
        arena = self.arenas.map(store.attach())
        pinning = self.pinnings.of(arena)
        until(lambda: pinning.done)
        return arena

    def close(self) -> None:
        self.arenas.close()
        self.pinnings.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()
    assert worker.registrar.registered == {}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArenaFiles]:
    store = ArenaFiles(tmp_path, SEGMENTS)
    yield store
    store.die()


def addresses(arena: ArenaMap) -> list[int]:
    return [int(segment.ctypes.data) for segment in arena.segments]


def test_the_next_session_with_a_store_finds_its_memory_mapped_and_pinned(
    worker: Worker, store: ArenaFiles
) -> None:
    first = worker.attach(store)
    found, lock = addresses(first), first.attachment.lock_path
    worker.arenas.leave(first)
    assert not is_locked(lock)
    second = worker.arenas.map(store.attach())
    assert addresses(second) == found
    assert worker.pinnings.of(second).done  # at once
    assert worker.registrar.calls == len(SEGMENTS)
    assert is_locked(second.attachment.lock_path)
    worker.arenas.leave(second)


def test_a_session_that_is_kept_shares_memory_with_the_next_one_but_not_its_lock(
    worker: Worker, store: ArenaFiles
) -> None:
    first, second = worker.attach(store), worker.attach(store)
    locks = [arena.attachment.lock_path for arena in (first, second)]
    assert addresses(first) == addresses(second)
    worker.arenas.leave(first)
    assert [is_locked(lock) for lock in locks] == [False, True]
    assert worker.pinnings.of(second).done
    assert worker.registrar.calls == len(SEGMENTS)
    worker.arenas.leave(second)


@pytest.mark.parametrize("end", ["die", "end"])
def test_the_memory_of_a_dead_store_is_given_up(worker: Worker, store: ArenaFiles, end: str) -> None:
    arena = worker.attach(store)
    getattr(store, end)()
    worker.arenas.leave(arena)
    until(lambda: not worker.registrar.registered and not mappings(store.path))


def test_the_memory_of_a_store_that_dies_later_is_given_up(worker: Worker, store: ArenaFiles) -> None:
    worker.arenas.leave(worker.attach(store))
    assert mappings(store.path)
    store.die()
    until(lambda: not worker.registrar.registered and not mappings(store.path))


def test_what_is_read_outlives_its_store(worker: Worker, store: ArenaFiles, tmp_path: Path) -> None:
    other = ArenaFiles(tmp_path, SEGMENTS)
    kept = worker.attach(store)
    store.end()
    new = worker.attach(other)
    assert len(worker.registrar.registered) == 2 * len(SEGMENTS)
    assert (kept.slot(0) == 0).all()
    worker.arenas.leave(kept)
    until(lambda: not mappings(store.path) and len(worker.registrar.registered) == len(SEGMENTS))
    worker.arenas.leave(new)
    other.die()


def test_an_engine_that_has_moved_to_another_store_keeps_nothing_of_the_first(
    worker: Worker, store: ArenaFiles, tmp_path: Path
) -> None:
    other = ArenaFiles(tmp_path, SEGMENTS)
    worker.arenas.leave(worker.attach(store))
    new = worker.attach(other)
    until(lambda: not mappings(store.path))
    assert mappings(other.path) == len(SEGMENTS)
    worker.arenas.leave(new)
    other.die()


def test_a_session_that_is_over_already_changes_nothing(worker: Worker, store: ArenaFiles) -> None:
    worker.arenas.leave(worker.attach(store))
    over = store.attach()
    Path(over.lock_path).unlink()
    with pytest.raises(UnavailableError, match="is over"):
        worker.arenas.map(over)
    assert mappings(store.path) == len(SEGMENTS)
    worker.arenas.leave(worker.attach(store))
    assert worker.registrar.calls == len(SEGMENTS)


def test_what_could_not_be_pinned_is_tried_again_by_the_next_session(
    worker: Worker, store: ArenaFiles
) -> None:
    worker.registrar.errors = {len(SEGMENTS): 2}
    first = worker.arenas.map(store.attach())
    refused = worker.pinnings.of(first)
    until(lambda: refused.error is not None)
    assert refused.error is not None
    assert "tried again whenever the engine attaches" in refused.error
    assert worker.registrar.registered == {}
    worker.arenas.leave(first)
    second = worker.attach(store)
    assert len(worker.registrar.registered) == len(SEGMENTS)
    worker.arenas.leave(second)


def test_close_gives_all_up(worker: Worker, store: ArenaFiles) -> None:
    worker.arenas.leave(worker.attach(store))
    worker.arenas.close()
    assert worker.registrar.registered == {}
    assert mappings(store.path) == 0


class ArenasMachine(RuleBasedStateMachine):
    """Stores come, grow and die; sessions with them begin, and end in any order."""

    @initialize()
    def begin(self) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.worker = Worker()
        self.stores: list[ArenaFiles] = []
        self.alive: set[ArenaFiles] = set()
        self.sessions: list[tuple[ArenaFiles, ArenaMap]] = []
        self.mapped: dict[ArenaFiles, list[int]] = {}
        """Stores whose memory is to be there, and the addresses of its segments."""

    def teardown(self) -> None:
        for _, arena in self.sessions:
            self.worker.arenas.leave(arena)
        self.worker.close()
        assert self.worker.registrar.registered == {}
        assert not any(mappings(store.path) for store in self.stores)
        for store in self.stores:
            store.die()
        self.home.cleanup()

    @precondition(lambda self: len(self.alive) < 3)
    @rule()
    def start(self) -> None:
        store = ArenaFiles(Path(self.home.name), SEGMENTS)
        self.stores.append(store)
        self.alive.add(store)

    @precondition(lambda self: self.alive and len(self.sessions) < 5)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        store = data.draw(st.sampled_from([store for store in self.stores if store in self.alive]))
        calls, before = self.worker.registrar.calls, self.mapped.get(store, [])
        arena = self.worker.attach(store)
        found = addresses(arena)
        assert found[: len(before)] == before
        assert self.worker.registrar.calls - calls == len(store.segments) - len(before)
        self.mapped[store] = found
        self.sessions.append((store, arena))
        self.settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, arena = self.sessions.pop(data.draw(st.integers(0, len(self.sessions) - 1)))
        lock = arena.attachment.lock_path
        self.worker.arenas.leave(arena)
        assert not Path(lock).exists() or not is_locked(lock)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        store = data.draw(st.sampled_from([store for store in self.stores if store in self.alive]))
        if len(store.segments) < 5:
            store.grow(EXTENT)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), suddenly=st.booleans())
    def end(self, data: st.DataObject, suddenly: bool) -> None:
        store = data.draw(st.sampled_from([store for store in self.stores if store in self.alive]))
        store.die() if suddenly else store.end()
        self.alive.discard(store)
        self.settle()

    def settle(self) -> None:
        used = {store for store, _ in self.sessions}
        wanted = used or self.alive
        self.mapped = {store: found for store, found in self.mapped.items() if store in wanted}
        until(lambda: self.is_there() == {store.path: len(found) for store, found in self.mapped.items()})

    def is_there(self) -> dict[Path, int]:
        return {store.path: count for store in self.stores if (count := mappings(store.path))}

    @invariant()
    def pins_are_the_mappings(self) -> None:
        pinned = [address for found in self.mapped.values() for address in found]
        until(lambda: sorted(self.worker.registrar.registered) == sorted(pinned))

    @invariant()
    def who_reads_holds_a_lock(self) -> None:
        for store, arena in self.sessions:
            assert (arena.slot(0) == 0).all()
            if store in self.alive:
                assert is_locked(arena.attachment.lock_path)


TestArenas = ArenasMachine.TestCase
TestArenas.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
