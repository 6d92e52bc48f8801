"""Child processes that don't outlive the demo, each with a log file and a process group of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from kvsieve_store.errors import KVSieveError

_POLL_SECONDS = 0.2
_END_SECONDS = 15.0
_GONE_SECONDS = 15.0
_TAIL_LINES = 40


class DemoError(KVSieveError):
    """A step of the demo failed. log: file that says more, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class Child:
    """A process and everything that it starts: one group, ended together.

    As a context manager it is ended, with SIGTERM and then SIGKILL, on the way out.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        """name: for messages. log: file that gets what it prints."""
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and that of the group."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Returns when `ready` says so. Raises DemoError when the process ends first, or the time is up."""
        deadline = time.monotonic() + timeout
        while not ready():
            if (status := self._process.poll()) is not None:
                raise DemoError(f"the {self.name} ended with status {status} before it was ready", self.log)
            if time.monotonic() > deadline:
                raise DemoError(f"the {self.name} was not ready within {timeout:g} s", self.log)
            time.sleep(_POLL_SECONDS)

    def wait(self, timeout: float) -> None:
        """Until it ends by itself. Raises DemoError unless it ends well and in time."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the {self.name} was not done within {timeout:g} s", self.log) from None
        if status != 0:
            raise DemoError(f"the {self.name} failed with status {status}", self.log)

    def kill(self) -> None:
        """SIGKILL to the whole group: nobody gets to say goodbye. Returns when all are gone.

        What vLLM's processes share among themselves in /dev/shm, and can't remove any more, is removed.
        """
        left = {path for process in self._group() for path in _private_shm(process.pid)}
        self._signal(signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _GONE_SECONDS
        while self.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)
        for path in left:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the group; in good order if it can be had."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def alive(self) -> bool:
        """Whether a process of the group is left; one that nobody has waited for yet does not count."""
        return any(process.info["status"] != psutil.STATUS_ZOMBIE for process in self._group())

    def _group(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.pid:
                    yield process

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _private_shm(pid: int) -> set[str]:
    """Files of Python's multiprocessing in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\w+$", maps, re.MULTILINE))


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
