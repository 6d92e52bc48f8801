"""Pinning of the arena: chunks, the thread, progress and errors, with a registrar that only notes calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_connector.copy.pinning import Chunk, Pinning, Progress, chunks, failure
from tests.protocol.client_stores import until

EXTENT = 4096
GIB = 1 << 30


class NotingRegistrar:
    """Keeps what is registered. errors: call number (from 1) -> code. gate: what registrations wait for."""

    def __init__(self, errors: dict[int, int] | None = None, gate: threading.Event | None = None) -> None:
        self.errors = errors or {}
        self.gate = gate
        self.calls = 0
        self.registered: dict[int, int] = {}
        self.threads: set[str] = set()
        self.first = threading.Event()

    def enter(self) -> None:
        self.threads.add(threading.current_thread().name)

    def register(self, address: int, size: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        self.first.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        error = self.errors.get(self.calls, 0)
        if not error:
            self.registered[address] = size
        return error

    def unregister(self, address: int) -> int:
        self.threads.add(threading.current_thread().name)
        return 0 if self.registered.pop(address, None) else 713


def segments(*extents: int) -> list[np.ndarray]:
    return [np.zeros(n * EXTENT, np.uint8) for n in extents]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk_bytes=st.integers(1, 50 * EXTENT),
)
def test_chunks_cover_the_segments_and_no_extent_is_cut(sizes: list[int], chunk_bytes: int) -> None:
    ends = np.cumsum([0, *(n * EXTENT + 7 * EXTENT for n in sizes)])  # gaps between segments
    given_segments = [(int(at), n * EXTENT) for at, n in zip(ends, sizes, strict=False)]
    made = list(chunks(given_segments, EXTENT, chunk_bytes))
    assert all(chunk.size % EXTENT == 0 for chunk in made)
    assert all(chunk.size <= max(chunk_bytes, EXTENT) for chunk in made)
    covered = [chunk.address + at for chunk in made for at in range(0, chunk.size, EXTENT)]
    assert covered == [at + i for at, size in given_segments for i in range(0, size, EXTENT)]


def test_chunks_of_a_large_segment_are_a_gib() -> None:
    extent = 64 << 20
    made = list(chunks([(extent, 5 * GIB // 2)], extent))
    assert made == [Chunk(extent, GIB), Chunk(extent + GIB, GIB), Chunk(extent + 2 * GIB, GIB // 2)]


def test_an_arena_is_pinned_on_a_thread_and_given_back() -> None:
    registrar = NotingRegistrar()
    arena = segments(3, 1)
    pinning = Pinning(arena, EXTENT, registrar)
    until(lambda: pinning.done)
    assert registrar.registered == {int(s.ctypes.data): s.nbytes for s in arena}
    pinning.undo()
    assert registrar.registered == {}
    assert not pinning.done
    assert pinning.error is None
    assert registrar.threads == {"kvsieve-pin"}
    pinning.undo()


def test_undo_waits_for_the_chunk_under_way_and_pins_no_other() -> None:
    gate = threading.Event()
    registrar = NotingRegistrar(gate=gate)
    pinning = Pinning(segments(1, 1, 1), EXTENT, registrar)
    assert registrar.first.wait(30)
    undoing = threading.Thread(target=pinning.undo)
    undoing.start()
    until(pinning._stop.is_set)
    assert not pinning.done
    gate.set()
    undoing.join(30)
    assert not undoing.is_alive()
    assert registrar.calls == 1
    assert registrar.registered == {}


def test_a_refused_chunk_gives_the_others_back() -> None:
    registrar = NotingRegistrar(errors={3: 2})
    pinning = Pinning(segments(1, 1, 1, 1), EXTENT, registrar)
    until(lambda: pinning.error is not None and not registrar.registered)
    assert not pinning.done
    assert "cudaErrorMemoryAllocation (2)" in str(pinning.error)
    assert registrar.calls == 3
    pinning.undo()


def test_two_arenas_live_side_by_side() -> None:
    registrar = NotingRegistrar()
    old, new = segments(2), segments(1)
    before = Pinning(old, EXTENT, registrar)
    until(lambda: before.done)
    after = Pinning(new, EXTENT, registrar)
    until(lambda: after.done)
    assert before.done
    assert len(registrar.registered) == 2
    before.undo()
    assert list(registrar.registered) == [int(new[0].ctypes.data)]
    after.undo()
    assert registrar.registered == {}


def test_what_an_arena_has_grown_by_is_pinned_in_addition() -> None:
    gate = threading.Event()
    gate.set()
    registrar = NotingRegistrar(gate=gate)
    arena = segments(2, 1, 1)
    pinning = Pinning(arena[:2], EXTENT, registrar)
    until(lambda: pinning.done)
    pinning.extend(arena[:2])
    assert pinning.done
    assert registrar.calls == 2
    gate.clear()
    pinning.extend(arena)
    assert not pinning.done
    assert len(registrar.registered) == 2  # what was pinned stays so
    gate.set()
    until(lambda: pinning.done)
    assert registrar.calls == 3
    assert registrar.registered == {int(s.ctypes.data): s.nbytes for s in arena}
    pinning.undo()
    assert registrar.registered == {}


def test_when_the_growth_is_refused_the_rest_stays_pinned_and_it_can_be_tried_again() -> None:
    registrar = NotingRegistrar(errors={3: 2})
    arena = segments(1, 1, 1)
    pinning = Pinning(arena[:1], EXTENT, registrar)
    until(lambda: pinning.done)
    pinning.extend(arena)
    until(lambda: pinning.error is not None and not pinning._under_way)
    assert not pinning.done
    assert list(registrar.registered) == [int(arena[0].ctypes.data)]
    pinning.extend(arena)
    until(lambda: pinning.done)
    assert pinning.error is None
    assert len(registrar.registered) == 3
    pinning.undo()
    assert registrar.registered == {}


def test_undo_while_growth_waits_pins_no_more() -> None:
    gate = threading.Event()
    registrar = NotingRegistrar(gate=gate)
    pinning = Pinning(segments(1), EXTENT, registrar)
    pinning.extend(segments(1, 1))
    assert registrar.first.wait(30)
    undoing = threading.Thread(target=pinning.undo)
    undoing.start()
    until(pinning._stop.is_set)
    gate.set()
    undoing.join(30)
    assert not undoing.is_alive()
    assert (registrar.calls, registrar.registered) == (1, {})


def test_progress_is_told_every_tenth_but_once_a_second_at_most() -> None:
    now = 100.0
    progress = Progress(100 * GIB, lambda: now)
    told = []
    for done in range(1, 101):
        now += 1 / 16
        if line := progress.line(done * GIB):
            told.append(line)
    assert told[0] == "pinning the arena: 16.0 of 100.0 GiB, 16.0 GiB/s"
    assert told[-1] == "the arena is pinned: 100.0 of 100.0 GiB, 16.0 GiB/s"
    assert len(told) == 7


def test_progress_is_told_every_ten_seconds_when_it_is_slow() -> None:
    now = 0.0
    progress = Progress(100 * GIB, lambda: now)
    told = []
    for done in range(1, 9):
        now += 4.0
        if line := progress.line(done * GIB):
            told.append(line)
    assert told == [
        "pinning the arena: 3.0 of 100.0 GiB, 0.2 GiB/s",
        "pinning the arena: 6.0 of 100.0 GiB, 0.2 GiB/s",
    ]


@pytest.mark.parametrize(
    ("memlock", "says"),
    [
        (8 << 20, ["RLIMIT_MEMLOCK is 0.01 GiB", "ulimit -l", "memlock=-1", "--pool-size below 0.01 GiB"]),
        (None, ["RLIMIT_MEMLOCK is unlimited", "smaller --pool-size", "container"]),
        (64 * GIB, ["RLIMIT_MEMLOCK is 64.00 GiB", "smaller --pool-size"]),
    ],
)
def test_a_failure_says_what_was_refused_and_what_to_do(memlock: int | None, says: list[str]) -> None:
    text = failure(1, GIB, 2 * GIB, 8 * GIB, memlock)
    for part in ["at 2.0 of 8.0 GiB", "of 1.00 GiB returned cudaErrorInvalidValue (1)", *says]:
        assert part in text
    assert "CUDA error (12345)" in failure(12345, GIB, 0, GIB, None)
