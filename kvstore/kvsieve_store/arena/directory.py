"""The directory of one store's arena, and the removal of what a dead store left behind.

    <mount>/kvsieve-<store>-<random>/    mode 0700
        store.lock                       held exclusively for as long as the store lives
        seg-000 ...                      segments
        session-1.lock ...               one per session

<store> is made from the store's first address. Two stores in two containers may have the same address and
share the mount; only store.lock says which directory is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from kvsieve_store.protocol.layout import STORE_LOCK

_log = logging.getLogger(__name__)


class ArenaDirectory:
    """A directory that lives as long as its store."""

    def __init__(self, mount: Path, store: str) -> None:
        """Creates it. store: the store's first address."""
        self.path = mount / f"{_prefix(store)}{secrets.token_hex(4)}"
        # Locked before it has its name, so that nobody takes it for dead.
        unnamed = mount / f".{self.path.name}"
        unnamed.mkdir(mode=0o700)
        self._fd = os.open(unnamed / STORE_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path)
        self._identity = _identity(self.path)

    def is_there(self) -> bool:
        """Whether the path still leads here: not removed, not unmounted, not hidden by another mount."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    def close(self) -> None:
        """Unlinks everything. Memory that engines have mapped stays until they unmap it."""
        if self.is_there():
            _remove(self.path)
        os.close(self._fd)


def remove_stale(mount: Path, store: str) -> list[Path]:
    """Removes the directories of dead stores of this address; returns them."""
    removed = []
    for path in _directories(mount, store):
        try:
            fd = os.open(path / STORE_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            # Shared, as by an engine that looks whether its store lives: neither is in the other's way.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(path)
            removed.append(path)
            _log.info("removed the arena of a dead store: %s", path)
        finally:
            os.close(fd)
    return removed


def _remove(path: Path) -> None:
    """store.lock goes last: as long as it is there, another store finds what is left and removes it."""
    with contextlib.suppress(OSError):
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == STORE_LOCK):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        path.rmdir()


def find_dead(mount: Path) -> list[Path]:
    """Directories of dead stores of any address, as far as this user may look into them. Removes nothing."""
    dead = []
    for path in sorted(mount.glob("kvsieve-*")):
        try:
            fd = os.open(path / STORE_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            dead.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return dead


def held_bytes(path: Path) -> int:
    """Memory that the files of an arena take; those that go meanwhile count as nothing."""
    held = 0
    with contextlib.suppress(OSError):
        for file in path.iterdir():
            with contextlib.suppress(OSError):
                found = file.lstat()
                held += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return held


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _directories(mount: Path, store: str) -> Iterator[Path]:
    for path in sorted(mount.glob(f"{_prefix(store)}*")):
        try:
            found = path.lstat()
        except FileNotFoundError:  # another store has just removed it
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            yield path


def _prefix(store: str) -> str:
    return f"kvsieve-{hashlib.sha256(store.encode()).hexdigest()[:12]}-"
