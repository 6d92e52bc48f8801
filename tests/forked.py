"""Store processes forked from one that has imported the store: they start in a tenth of the time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import netns

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",  # what a child takes for the main module
        "kvsieve_store.cli.main",
        "kvsieve_store.cli.serve",
        "kvsieve_store.cli.terminal",
        "kvsieve_store.server.process",
        "tests.forked",
    ]
)


class Forked:
    """`kvsieve ARGS` in a process of its own. What it can do is what subprocess.Popen can."""

    def __init__(self, args: Sequence[str], log: Path, namespace: str = "") -> None:
        """log: gets what it writes to standard output and error. namespace: path of a network namespace."""
        self._process = _CONTEXT.Process(
            target=_run, args=(list(args), str(log), dict(os.environ), namespace), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, below 0 for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("kvsieve", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(args: list[str], log: str, environ: Mapping[str, str], namespace: str) -> None:
    """In the child."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    sys.stdin = open(0)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    if namespace:
        netns.enter(namespace)
    sys.argv = ["kvsieve", *args]
    from kvsieve_store.cli.main import main

    main()
