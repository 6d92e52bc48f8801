"""Unix sockets: one store each, for this user only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsieve_store.arena import SocketLock
from kvsieve_store.errors import SettingsError


def claim(path: Path) -> SocketLock:
    """Makes the socket's directory (mode 0700), locks the socket, removes a dead store's.

    Raises UnavailableError when another store serves it, SettingsError when the path can't be used.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = SocketLock(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise SettingsError(f"listen: can't use {path}: {error.strerror}") from None
    try:
        remove(path)
    except BaseException:
        lock.close()
        raise
    return lock


def remove(path: Path) -> None:
    """Removes a socket, if it is there. Raises SettingsError when the path is something else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"listen: {path} exists and is not a socket; remove it, or listen elsewhere")
    path.unlink(missing_ok=True)


@contextmanager
def owner_only() -> Iterator[None]:
    """Files and sockets made inside have mode 0600. Holds for the whole process: keep it short."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
