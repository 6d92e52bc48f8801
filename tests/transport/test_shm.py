"""Paths that a peer names as its memory are mapped only when they are what it says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvsieve_store.transport.description import Segment
from kvsieve_store.transport.shm import map_peer


def segment(path: Path, **changes: int) -> Segment:
    there = path.lstat()
    given = {"size": max(there.st_size, 1), "device": there.st_dev, "inode": there.st_ino} | changes
    return Segment(path=str(path), **given)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(200)))
    return path


def test_what_is_as_said_is_mapped(file: Path) -> None:
    memory = map_peer((segment(file),))
    assert memory is not None
    (whole,) = memory.slices(np.array([0], np.uint64), np.array([200], np.uint64))
    assert bytes(whole) == bytes(range(200))


@pytest.mark.parametrize("changes", [{"size": 100}, {"size": 4096}, {"device": 0}, {"inode": 1}])
def test_another_file_is_not(file: Path, changes: dict[str, int]) -> None:
    assert map_peer((segment(file, **changes),)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory", "nothing"])
def test_what_is_no_file_is_not_waited_for(file: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to(file)
    elif kind == "directory":
        path.mkdir()
    named = segment(path if kind != "nothing" else file)
    assert map_peer((named.model_copy(update={"path": str(path)}),)) is None
