"""A store process of its own, for the length of a benchmark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvsieve_store.client import AdminClient
from kvsieve_store.errors import UnavailableError

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


class TemporaryStore:
    """`kvsieve serve` on a socket in a folder that goes with it. A context manager."""

    def __init__(self, *flags: str) -> None:
        """flags: of `kvsieve serve`, besides its address."""
        self._flags = flags
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Returns once engines can attach. Raises UnavailableError with the store's log when they can't."""
        self._folder = Path(tempfile.mkdtemp(prefix="kvsieve-bench-"))
        self.endpoint = f"unix://{self._folder / 'kvsieve.sock'}"
        command = [sys.executable, "-m", "kvsieve_store.cli.main", "serve", "--listen", self.endpoint]
        command += ["--http", "", "--log-level", "warning", *self._flags]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSIEVE_")}
        log = self._folder / "store.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ
            )
        try:
            self._wait_until_ready(log)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        with AdminClient(self.endpoint) as admin:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    if admin.status().state == "ready":
                        return
                except UnavailableError:
                    pass
                time.sleep(0.1)
        raise UnavailableError(f"the benchmark's store did not start:\n{log.read_text(errors='replace')}")
