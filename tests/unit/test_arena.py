"""The arena: what it creates, where headers go, what it leaves behind."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.arena import Arena, syscalls
from kvsieve_store.arena.directory import _prefix, remove_stale
from kvsieve_store.cli import checks
from kvsieve_store.errors import CapacityError, SettingsError, UnavailableError
from kvsieve_store.protocol.layout import HEADER_BYTES, HEADER_LAYERS_DONE, ExtentLayout

EXTENT = 64 << 10
SEGMENT = 4 * EXTENT
SIZE = 10 * EXTENT

Create = Callable[..., Arena]


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Create]:
    """create() -> an arena of ten extents in segments of four."""
    arenas: list[Arena] = []

    def make(pool_size: int = SIZE, store: str = "unix:///a", numa_node: int | None = None) -> Arena:
        arenas.append(Arena.create(tmp_path, pool_size, EXTENT, SEGMENT, store=store, numa_node=numa_node))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()


def memory(arena: Arena) -> np.ndarray:
    """All segments, one after another."""
    return np.concatenate([segment.view for segment in arena.segments])


def test_segments_cover_the_size_and_are_for_the_owner_only(create: Create, tmp_path: Path) -> None:
    arena = create(SIZE + 4096)
    assert arena.path.parent == tmp_path
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o700
    assert [s.size for s in arena.segments] == [SEGMENT, SEGMENT, 2 * EXTENT]
    assert arena.size == SIZE
    for i, segment in enumerate(arena.segments):
        assert segment.path == arena.path / f"seg-{i:03}"
        assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
        assert segment.path.stat().st_size == segment.size


def test_others_see_the_same_memory(create: Create) -> None:
    arena = create()
    arena.segments[1].view[5] = 7
    assert arena.segments[1].path.read_bytes()[5] == 7


def test_close_leaves_nothing(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, SIZE, EXTENT, SEGMENT, store="unix:///a")
    arena.new_session_lock()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_creates_nothing(create: Create, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"pool_size: 1024 PiB needed, .* lower --pool-size"):
        create(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing(
    create: Create, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, size: int) -> None:
        if size < SEGMENT:
            raise OSError(errno.ENOSPC, "No space left on device")
        truncate(fd, size)

    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", no_space)
    with pytest.raises(CapacityError, match="No space left on device"):
        create()
    assert list(tmp_path.iterdir()) == []


def test_a_mount_that_is_not_there(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SettingsError, match=f"shm_dir: {nowhere} is not a directory"):
        Arena.create(nowhere, SIZE, EXTENT, SEGMENT, store="unix:///a")


def test_a_directory_that_is_no_hugetlbfs(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="is not a hugetlbfs mount"):
        Arena.create(tmp_path, SIZE, EXTENT, SEGMENT, store="unix:///a", hugetlbfs=True)


def test_a_numa_node_that_is_not_there(create: Create, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="numa_node: can't bind memory to node 1000: "):
        create(numa_node=1000)
    assert list(tmp_path.iterdir()) == []


# Prefault


def allocated(arena: Arena) -> int:
    """Bytes that the files take."""
    return sum(segment.path.stat().st_blocks * 512 for segment in arena.segments)


@pytest.mark.parametrize("has_populate", [True, False])
def test_prefault_allocates_everything(
    create: Create, monkeypatch: pytest.MonkeyPatch, has_populate: bool
) -> None:
    if not has_populate:
        monkeypatch.setattr(syscalls, "populate", lambda address, length: False)
    arena = create()
    shares: list[float] = []
    arena.prefault(shares.append, threads=3)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for segment in arena.segments:
        with segment.path.open("rb") as file:
            os.fsync(file)
    assert allocated(arena) >= SIZE
    assert not memory(arena).any()


def test_prefault_stops_when_told(create: Create) -> None:
    stop = threading.Event()
    stop.set()
    arena = create()
    arena.prefault(stop=stop)
    assert allocated(arena) == 0


def test_prefault_says_that_memory_ran_out(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(address: int, length: int) -> bool:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(syscalls, "populate", no_memory)
    with pytest.raises(
        CapacityError, match=r"memory ran out at 0 B of .* Cannot allocate memory; lower --pool-size"
    ):
        create().prefault()


def test_reserve_takes_all_memory_and_leaves_it_zero(create: Create) -> None:
    arena = create()
    assert allocated(arena) == 0
    arena.reserve()
    assert allocated(arena) >= SIZE
    assert not memory(arena).any()


def test_reserve_says_that_memory_ran_out(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(CapacityError, match=r"memory ran out at 0 B of .* No space left on device"):
        create().reserve()


# Headers


@settings(max_examples=50, deadline=None)
@given(data=st.data(), slot_bytes=st.sampled_from([4096, 8192, 20480]))
def test_headers_are_where_the_layout_says(
    tmp_path_factory: pytest.TempPathFactory, data, slot_bytes
) -> None:
    layout = ExtentLayout.of(EXTENT, slot_bytes)
    all_slots = st.integers(0, SIZE // EXTENT * layout.slots_per_extent - 1)
    slots = data.draw(st.lists(all_slots, unique=True, max_size=40))
    generations = data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=len(slots), max_size=len(slots)))
    arena = Arena.create(tmp_path_factory.mktemp("arena"), SIZE, EXTENT, SEGMENT, store="unix:///a")
    try:
        arena.write_generations(layout, np.array(slots, np.uint32), np.array(generations, np.uint32))
        expected = np.zeros(SIZE, np.uint8)
        for slot, generation in zip(slots, generations, strict=True):
            at = layout.header_address(slot)
            expected[at : at + 8] = np.frombuffer(generation.to_bytes(8, "little"), np.uint8)
        assert (memory(arena) == expected).all()
    finally:
        arena.close()


def grant(arena: Arena, layout: ExtentLayout, slots: list[int], generation: int) -> None:
    arena.write_generations(layout, np.array(slots, np.uint32), np.full(len(slots), generation, np.uint32))


def test_a_new_grant_clears_layers_done_and_nothing_else(create: Create) -> None:
    arena, layout = create(), ExtentLayout.of(EXTENT, 4096)
    arena.segments[0].view[:] = 0xFF
    grant(arena, layout, [1], 5)
    header = arena.segments[0].view[HEADER_BYTES : 2 * HEADER_BYTES]
    assert header[:8].view(np.uint64)[0] == 5
    assert (header[8:HEADER_LAYERS_DONE] == 0xFF).all()
    assert not header[HEADER_LAYERS_DONE:].any()
    assert (arena.segments[0].view[2 * HEADER_BYTES :] == 0xFF).all()


def test_an_extent_that_changes_layout_forgets_its_old_generations(create: Create) -> None:
    """Else a late reader of the old pool would find its generation unchanged over new bytes."""
    arena = create()
    small, large = ExtentLayout.of(EXTENT, 4096), ExtentLayout.of(EXTENT, 16384)
    in_extent_5 = small.slots_per_extent * 5
    grant(arena, small, [in_extent_5 + i for i in range(small.slots_per_extent)], 9)
    grant(arena, large, [large.slots_per_extent * 5 + 1], 10)
    generations = [
        memory(arena)[small.header_address(in_extent_5 + i)] for i in range(small.slots_per_extent)
    ]
    assert generations == [0, 10] + [0] * (small.slots_per_extent - 2)


# Dead stores


def test_only_the_arena_of_a_dead_store_of_the_same_address_is_removed(
    create: Create, tmp_path: Path
) -> None:
    mine, other = create().path, create(store="unix:///b").path
    dead = mine.with_name(f"{mine.name}dead")
    dead.mkdir()
    (dead / "store.lock").touch()
    (dead / "seg-000").write_bytes(b"x")
    newest = create().path
    assert set(tmp_path.iterdir()) == {mine, other, newest}


def test_who_looks_whether_a_dead_store_lives_does_not_keep_it(create: Create, tmp_path: Path) -> None:
    mine = create().path
    dead = mine.with_name(f"{mine.name}dead")
    dead.mkdir()
    with (dead / "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        create()
    assert not dead.exists()


def test_the_lock_of_a_dead_store_goes_last(
    create: Create, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a store that dies in the middle leaves files that nobody takes for dead."""
    dead = tmp_path / f"{create().path.name}dead"
    dead.mkdir()
    for name in ("a", "store.lock", "z"):
        (dead / name).touch()
    left: list[set[str]] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.name == "store.lock":
            left.append({entry.name for entry in path.parent.iterdir()})
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    create()
    assert left == [{"store.lock"}]
    assert not dead.exists()


def test_stores_and_doctors_may_remove_and_look_at_the_same_arenas(tmp_path: Path) -> None:
    for _ in range(20):
        for number in range(40):
            dead = tmp_path / f"{_prefix('x')}{number:08x}"
            dead.mkdir()
            for name in ("store.lock", "seg-000"):
                (dead / name).touch()
        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(job) for job in 2 * [partial(remove_stale, tmp_path, "x")]]
            jobs += [threads.submit(job) for job in 2 * [partial(checks.arenas, tmp_path)]]
        for job in jobs:
            job.result()
        assert not list(tmp_path.iterdir())


# An arena that somebody removes


def test_an_arena_that_is_gone_is_missing(create: Create) -> None:
    arena = create()
    assert arena.missing() is None
    arena.segments[1].path.unlink()
    assert arena.missing() == arena.segments[1].path
    away = arena.path.rename(arena.path.with_name("away"))
    assert arena.missing() == arena.path
    with pytest.raises(UnavailableError, match=r"can't create a lock file .* No such file"):
        arena.new_session_lock()
    arena.path.mkdir()
    assert arena.missing() == arena.path
    arena.path.rmdir()
    away.rename(arena.path)
