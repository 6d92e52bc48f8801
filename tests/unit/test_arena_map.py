"""ArenaMap over plain files: where bytes lie, and who holds which lock."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsieve_store.client import ArenaMap, ArenaMemory, Attachment
from kvsieve_store.errors import InvalidRequestError, UnavailableError
from kvsieve_store.protocol.layout import HEADER_LAYERS_DONE
from tests.protocol.client_stores import is_locked
from tests.unit.arena_files import EXTENT, LAYOUT, SEGMENTS, SLOTS, ArenaFiles, again, mappings


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Attachment]]:
    """make() -> the attachment of a new store; make(of=attachment) -> a newer session with the same store."""
    stores: list[ArenaFiles] = []

    def make(of: Attachment | None = None) -> Attachment:
        if of is not None:
            return again(of)
        stores.append(ArenaFiles(tmp_path))
        return stores[-1].attach()

    yield make
    for store in stores:
        store.die()


def arena_bytes(attachment: Attachment) -> bytes:
    return b"".join(Path(path).read_bytes() for path, _ in attachment.segments)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slot=st.integers(0, SLOTS - 1), content=st.binary(min_size=1, max_size=100))
def test_a_slot_is_where_the_layout_says(make: Callable[..., Attachment], slot: int, content: bytes) -> None:
    attachment = make()
    with ArenaMap(attachment) as arena:
        view = arena.slot(slot)
        assert view.shape == (LAYOUT.slot_bytes,)
        view[: len(content)] = np.frombuffer(content, np.uint8)
    at = LAYOUT.slot_address(slot)
    assert arena_bytes(attachment)[at : at + len(content)] == content


def test_an_address_is_that_of_the_slot(make: Callable[..., Attachment]) -> None:
    with ArenaMap(make()) as arena:
        for slot in (0, 1, LAYOUT.slots_per_extent, SLOTS - 1):
            arena.slot(slot)[:4] = [slot % 251, 2, 3, 4]
            assert ctypes.string_at(arena.address(slot), 4) == bytes([slot % 251, 2, 3, 4])
        with pytest.raises(InvalidRequestError):
            arena.address(SLOTS)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slots=st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=20))
def test_generations_are_read_from_the_headers(make: Callable[..., Attachment], slots: list[int]) -> None:
    with ArenaMap(make()) as arena:
        starts = np.cumsum([0, *SEGMENTS])
        for generation, slot in enumerate(slots, 1 << 31):
            at = LAYOUT.header_address(slot)
            segment = int(np.searchsorted(starts, at, side="right")) - 1
            word = np.frombuffer(generation.to_bytes(8, "little"), np.uint8)
            arena.segments[segment][at - starts[segment] :][:8] = word
        expected = list(range(1 << 31, (1 << 31) + len(slots)))
        assert [arena.generation(slot) for slot in slots] == expected
        assert arena.generations(slots).tolist() == expected
        assert arena.generations(slots).dtype == np.uint64


def test_layers_done_is_a_word_per_shard(make: Callable[..., Attachment]) -> None:
    attachment = make()
    with ArenaMap(attachment) as arena:
        arena.set_layers_done(SLOTS - 1, 0, 61)
        arena.set_layers_done(SLOTS - 1, 31, 300)
        assert [arena.layers_done(SLOTS - 1, shard) for shard in (0, 1, 31)] == [61, 0, 300]
        assert arena.generation(SLOTS - 1) == 0
    at = LAYOUT.header_address(SLOTS - 1) + HEADER_LAYERS_DONE
    assert arena_bytes(attachment)[at : at + 2] == (61).to_bytes(2, "little")


def test_two_maps_share_the_memory(make: Callable[..., Attachment]) -> None:
    attachment = make()
    with ArenaMap(attachment) as one, ArenaMap(make(of=attachment)) as other:
        one.slot(3)[:] = 7
        assert (other.slot(3) == 7).all()


def addresses(arena: ArenaMap) -> list[int]:
    return [int(segment.ctypes.data) for segment in arena.segments]


def test_maps_of_two_sessions_share_one_memory_and_have_a_lock_each(make: Callable[..., Attachment]) -> None:
    first = make()
    second, home = make(of=first), Path(first.lock_path).parent
    one = ArenaMap(first)
    other = ArenaMap(second, one.memory)
    assert (other.memory, addresses(other)) == (one.memory, addresses(one))
    assert mappings(home) == len(SEGMENTS)
    one.close()
    assert not is_locked(first.lock_path)
    assert is_locked(second.lock_path)
    other.slot(3)[:] = 7
    assert mappings(home) == len(SEGMENTS)
    other.close()
    assert mappings(home) == 0


def test_memory_of_another_store_is_not_shared(make: Callable[..., Attachment]) -> None:
    with ArenaMap(make()) as one, ArenaMap(make(), one.memory) as other:
        assert other.memory is not one.memory
        one.slot(1)[:] = 1
        assert (other.slot(1) == 0).all()


@pytest.mark.parametrize("by_update", [True, False])
def test_what_the_arena_has_grown_by_is_mapped_in_addition(tmp_path: Path, by_update: bool) -> None:
    store = ArenaFiles(tmp_path)
    with ArenaMap(store.attach()) as arena:
        before = addresses(arena)
        with pytest.raises(InvalidRequestError):
            arena.slot(SLOTS)
        store.grow(EXTENT)
        if by_update:
            arena.update(store.attach())
            grown = arena
        else:
            grown = ArenaMap(store.attach(), arena.memory)
        with grown:
            assert addresses(grown)[:-1] == before
            assert mappings(store.path) == len(SEGMENTS) + 1
            grown.slot(SLOTS)[:] = 3
            assert grown.generations([SLOTS]).tolist() == [0]
    store.die()


def test_growth_that_is_gone_leaves_the_memory_as_it_was(tmp_path: Path) -> None:
    store = ArenaFiles(tmp_path)
    with ArenaMap(store.attach()) as arena:
        for _ in range(2):
            store.grow(EXTENT)
        os.unlink(store.segments[-1][0])
        with pytest.raises(UnavailableError, match="is gone"):
            ArenaMap(store.attach(), arena.memory)
        assert mappings(store.path) == len(SEGMENTS)
    store.die()


@pytest.mark.parametrize("end", ["die", "end"])
def test_memory_knows_whether_its_store_lives(tmp_path: Path, end: str) -> None:
    store = ArenaFiles(tmp_path)
    with ArenaMap(store.attach()) as arena:
        memory = arena.memory
        assert memory.store_lives()
        assert memory.store_lives()
        getattr(store, end)()
        assert not memory.store_lives()
        assert (arena.slot(0) == 0).all()
    assert not ArenaMemory(b"").store_lives()


def test_memory_takes_its_store_for_alive_when_it_can_not_look(tmp_path: Path) -> None:
    store = ArenaFiles(tmp_path)
    with ArenaMap(store.attach()) as arena:
        store.die()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert arena.memory.store_lives()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not arena.memory.store_lives()


def test_another_process_maps_from_a_pickled_attachment(make: Callable[..., Attachment]) -> None:
    attachment = make()
    code = (
        "import pickle, sys; from kvsieve_store.client import ArenaMap\n"
        "ArenaMap(pickle.loads(sys.stdin.buffer.read())).slot(5)[:] = 9"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(attachment), check=True)
    with ArenaMap(attachment) as arena:
        assert (arena.slot(5) == 9).all()


def test_the_lock_is_held_until_close(make: Callable[..., Attachment]) -> None:
    attachment = make()
    arena = ArenaMap(attachment)
    assert is_locked(attachment.lock_path)
    arena.close()
    arena.close()
    assert not is_locked(attachment.lock_path)
    with pytest.raises(UnavailableError, match="closed"):
        arena.slot(0)


def test_views_outlive_close(make: Callable[..., Attachment]) -> None:
    arena = ArenaMap(make())
    view = arena.slot(0)
    view[:] = 1
    arena.close()
    assert (view == 1).all()


def test_update_within_a_store_keeps_the_mapping_and_moves_the_lock(make: Callable[..., Attachment]) -> None:
    first = make()
    second = make(of=first)
    with ArenaMap(first) as arena:
        addresses = [segment.ctypes.data for segment in arena.segments]
        arena.update(second)
        assert [segment.ctypes.data for segment in arena.segments] == addresses
        assert arena.attachment == second
        assert not is_locked(first.lock_path)
        assert is_locked(second.lock_path)


def test_update_to_another_store_maps_anew(make: Callable[..., Attachment]) -> None:
    first, second = make(), make()
    with ArenaMap(first) as arena:
        old = arena.slot(1)
        old[:] = 1
        arena.update(second)
        assert (arena.slot(1) == 0).all()
        assert (old == 1).all()
        arena.slot(1)[:] = 2
    at = LAYOUT.slot_address(1)
    assert arena_bytes(first)[at] == 1
    assert arena_bytes(second)[at] == 2


def test_a_failed_update_changes_nothing(make: Callable[..., Attachment]) -> None:
    first, second = make(), make()
    os.unlink(second.segments[2][0])
    with ArenaMap(first) as arena:
        arena.slot(1)[:] = 1
        with pytest.raises(UnavailableError, match=r"seg-2 is gone"):
            arena.update(second)
        assert arena.attachment == first
        assert (arena.slot(1) == 1).all()
        assert is_locked(first.lock_path)
        assert not is_locked(second.lock_path)


def test_update_after_close_maps_again(make: Callable[..., Attachment]) -> None:
    attachment = make()
    arena = ArenaMap(attachment)
    arena.slot(2)[:] = 4
    arena.close()
    with arena:
        arena.update(make(of=attachment))
        assert (arena.slot(2) == 4).all()


def test_a_session_that_is_over_is_refused(make: Callable[..., Attachment]) -> None:
    attachment = make()
    fd = os.open(attachment.lock_path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UnavailableError, match="is over"):
        ArenaMap(attachment)
    os.unlink(attachment.lock_path)
    os.close(fd)
    with pytest.raises(UnavailableError, match="is over"):
        ArenaMap(attachment)


def test_a_segment_of_another_size_is_refused(make: Callable[..., Attachment]) -> None:
    attachment = make()
    os.truncate(attachment.segments[1][0], 4096)
    with pytest.raises(UnavailableError, match=f"4096 bytes there, {EXTENT} expected"):
        ArenaMap(attachment)
    assert not is_locked(attachment.lock_path)


def _is_a_directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


def _is_a_socket(path: str) -> None:
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def _is_a_symlink(path: str) -> None:
    os.rename(path, path + "-moved")
    os.symlink(os.path.abspath(path) + "-moved", path)


def _has_no_directory(path: str) -> None:
    directory = os.path.dirname(path)
    shutil.rmtree(directory)
    Path(directory).touch()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("segment", _is_a_directory),
        ("segment", _is_a_socket),
        ("segment", _is_a_symlink),
        ("segment", _has_no_directory),
        ("lock", _is_a_socket),
        ("lock", _has_no_directory),
    ],
)
def test_what_is_no_file_of_the_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, change: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ArenaFiles(Path())  # short paths: those of sockets have 108 bytes
    attachment = store.attach()
    change(attachment.segments[1][0] if what == "segment" else attachment.lock_path)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(UnavailableError, match=store.path.name):
        ArenaMap(attachment)
    assert os.listdir("/proc/self/fd") == open_before
    assert mappings(store.path.absolute()) == 0
    store.die()


@pytest.mark.parametrize(
    "wrong",
    [
        {"extent_bytes": 0},
        {"extent_bytes": EXTENT - 4096},
        {"extent_bytes": -EXTENT},
        {"slots_per_extent": 0},
        {"slots_per_extent": LAYOUT.slots_per_extent + 1},
        {"slot_bytes": 0},
        {"slot_bytes": -LAYOUT.slot_bytes},
        {"slot_bytes": LAYOUT.slot_bytes * 2},
        {"slots_offset": 0},
        {"slots_offset": EXTENT},
        {"slots_offset": LAYOUT.slots_offset + 1},
        {"segments": ()},
    ],
    ids=str,
)
def test_a_layout_that_leads_out_of_the_arena_is_refused(
    make: Callable[..., Attachment], wrong: dict[str, Any]
) -> None:
    attachment = make()
    with ArenaMap(attachment) as arena:
        bad = replace(again(attachment), **wrong)
        with pytest.raises(UnavailableError, match="the store's layout makes no sense"):
            arena.update(bad)
        assert not is_locked(bad.lock_path)
        assert arena.attachment == attachment
        assert arena.slot(SLOTS - 1).shape == (LAYOUT.slot_bytes,)
        assert is_locked(attachment.lock_path)


def test_numbers_out_of_range_are_named(make: Callable[..., Attachment]) -> None:
    with ArenaMap(make()) as arena:
        for slot in (-1, SLOTS):
            with pytest.raises(InvalidRequestError, match=rf"slot: {slot} given, 0 to {SLOTS - 1} allowed"):
                arena.slot(slot)
            with pytest.raises(InvalidRequestError, match=rf"slot: {slot} given"):
                arena.generations([0, slot])
        with pytest.raises(InvalidRequestError, match="shard: 32 given, 0 to 31 allowed"):
            arena.layers_done(0, 32)
