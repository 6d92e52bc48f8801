"""Unix sockets: one store each, for this user only."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvsieve_store.addresses import MAX_SOCKET_PATH, UnixAddress
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
        _remove(path)
    except BaseException:
        lock.close()
        raise
    return lock


def bind(server: grpc.aio.Server, address: UnixAddress) -> Callable[[], None]:
    """Listens on a claimed socket; returns what removes it, unless another has taken its place by then.

    gRPC itself unlinks the path that it bound, whoever's socket is there. So it binds another name, which is
    gone by then. Raises SettingsError.
    """
    path = address.path
    bound = path.with_name(f".{secrets.token_hex(4)}")
    if len(os.fsencode(bound)) > MAX_SOCKET_PATH:
        bound = path
    try:
        with owner_only():
            server.add_insecure_port(UnixAddress(bound).grpc_target)
        bound.rename(path)
        mine = _identity(path)
    except (RuntimeError, OSError):
        raise SettingsError(f"listen: can't listen on {address}; is the directory writable?") from None

    def remove() -> None:
        if _identity(path) == mine:
            path.unlink(missing_ok=True)

    return remove


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove(path: Path) -> None:
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
