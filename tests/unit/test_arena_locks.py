"""Lock files, against processes that hold them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsieve_store.arena import SessionLock, SocketLock
from kvsieve_store.errors import UnavailableError

HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock shared until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_session_lock_is_free_when_its_last_holder_is_dead(tmp_path: Path) -> None:
    lock = SessionLock(tmp_path / "session-1.lock")
    first, second = holder(lock.path), holder(lock.path)
    assert not lock.is_free()
    first.kill()
    first.wait()
    assert not lock.is_free()
    second.kill()
    second.wait()
    assert lock.is_free()
    assert lock.is_free()
    assert not lock.path.exists()


def test_who_comes_late_sees_that_the_file_has_no_name(tmp_path: Path) -> None:
    lock = SessionLock(tmp_path / "session-1.lock")
    fd = os.open(lock.path, os.O_RDWR)
    try:
        assert lock.is_free()
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert os.fstat(fd).st_nlink == 0
    finally:
        os.close(fd)


def test_discard_removes_a_held_file(tmp_path: Path) -> None:
    lock = SessionLock(tmp_path / "session-1.lock")
    process = holder(lock.path)
    lock.discard()
    lock.discard()
    assert not lock.path.exists()
    process.kill()
    process.wait()


def test_a_socket_has_one_store(tmp_path: Path) -> None:
    lock = SocketLock(tmp_path / "a.sock.lock")
    with pytest.raises(
        UnavailableError, match=rf"process {os.getpid()}\) serves this socket: it holds .*a.sock.lock"
    ):
        SocketLock(tmp_path / "a.sock.lock")
    lock.close()
    SocketLock(tmp_path / "a.sock.lock").close()
