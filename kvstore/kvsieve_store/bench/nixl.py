"""NIXL in two processes of an interpreter that has it, as something to compare with."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from kvsieve_store.errors import UnavailableError
from kvsieve_store.transport.memory import U64Array

PYTHON = "KVSIEVE_NIXL_PYTHON"
"""Environment variable: an interpreter with nixl-cu12."""

_PROCESS = Path(__file__).with_name("nixl_process.py")
_SECONDS = 60.0


class Nixl:
    """Reads ranges of one process's memory into another's. Both stand still between two reads: NIXL's
    progress thread polls without a pause. A context manager."""

    def __init__(self, python: str, served: int, read: int, environ: dict[str, str]) -> None:
        """served, read: bytes of memory on either side. Raises UnavailableError."""
        self._exits = ExitStack()
        environ = {**os.environ, **environ}
        try:
            self._server = self._exits.enter_context(_process(python, "serve", served, environ))
            self._reader = self._exits.enter_context(_process(python, "read", read, environ))
            self._say(self._server.heard())
        except BaseException:
            self._exits.close()
            raise

    def prepare(self, offsets: U64Array, into: U64Array, size: int) -> None:
        """What read() reads: `size` bytes from each offset of the one memory to each of the other."""
        self._say({"from": offsets.tolist(), "into": into.tolist(), "size": size})

    def read(self) -> tuple[float, int]:
        """Seconds, and the sum of every 4,096th byte of what is there now. Raises UnavailableError."""
        self._signal(signal.SIGCONT)
        try:
            self._say({"go": 1})
            answer = self._reader.heard()
        finally:
            self._signal(signal.SIGSTOP)
        if answer["state"] != "DONE":
            raise UnavailableError(f"nixl: a read ended with {answer['state']}")
        return answer["seconds"], answer["sum"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.close()

    def _signal(self, number: int) -> None:
        for process in (self._server, self._reader):
            process.running.send_signal(number)

    def _say(self, line: dict[str, Any]) -> None:
        stdin = self._reader.running.stdin
        assert stdin is not None
        stdin.write(json.dumps(line).encode() + b"\n")
        stdin.flush()


@dataclass
class _Process:
    """errors: a file with what it has written to stderr. heard_ahead: output that is not asked for yet."""

    running: subprocess.Popen[bytes]
    errors: IO[bytes]
    heard_ahead: bytes = b""

    def heard(self) -> dict[str, Any]:
        """The next line that is JSON: NIXL writes there, too. Raises UnavailableError."""
        while (line := self._line()) is not None:
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self.running.kill()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(f"nixl: {last or 'no answer'}")

    def _line(self) -> bytes | None:
        """None when it has ended, or says nothing for a minute."""
        assert self.running.stdout is not None
        out = self.running.stdout.fileno()  # not through a buffer, of which select() knows nothing
        while b"\n" not in self.heard_ahead:
            if not select.select([out], [], [], _SECONDS)[0] or not (more := os.read(out, 1 << 16)):
                return None
            self.heard_ahead += more
        line, _, self.heard_ahead = self.heard_ahead.partition(b"\n")
        return line


@contextmanager
def _process(python: str, role: str, size: int, environ: dict[str, str]) -> Iterator[_Process]:
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [python, str(_PROCESS), role, str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
            )
        except OSError as error:
            raise UnavailableError(f"nixl: {python}: {error.strerror}") from None
        with process:
            try:
                yield _Process(process, errors)
            finally:
                process.kill()
