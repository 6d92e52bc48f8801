"""Locks by flock(2): one store per socket, and who may still touch a session's slots.

A flock dies with the last process that holds its file description, however that process ends. That is
what makes it a better sign of life than a process id or a socket.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvsieve_store.errors import UnavailableError


class SocketLock:
    """Says that a store owns a socket path. The file stays behind, so that its inode is the same for all."""

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises UnavailableError, which names the process that has it."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise UnavailableError(
                f"another store (process {holder}) serves this socket: it holds {path}; "
                "stop it, or give --listen another address"
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        os.close(self._fd)


class SessionLock:
    """A session's lock file: clients hold it shared for as long as they may touch the session's memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def is_free(self) -> bool:
        """Whether no process holds the lock. Once it was free the file is gone and nobody can take it again.

        A client that opened the file in time but locks it only afterwards sees that it has no name any more
        (st_nlink is 0), and must not touch the memory.
        """
        if self._fd < 0:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.discard()
        return True

    def discard(self) -> None:
        """Removes the file, held or not."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
