"""NIXL in two processes of an interpreter that has it, as something to compare with."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

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
            self._say(_heard(self._server))
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
            answer = _heard(self._reader)
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
            process.send_signal(number)

    def _say(self, line: dict[str, Any]) -> None:
        assert self._reader.stdin is not None
        self._reader.stdin.write(json.dumps(line).encode() + b"\n")
        self._reader.stdin.flush()


@contextmanager
def _process(python: str, role: str, size: int, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            [python, str(_PROCESS), role, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
    except OSError as error:
        raise UnavailableError(f"nixl: {python}: {error.strerror}") from None
    with process:
        try:
            yield process
        finally:
            process.kill()


def _heard(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next line that is JSON: NIXL writes there, too."""
    assert process.stdout is not None
    while select.select([process.stdout], [], [], _SECONDS)[0]:
        line = process.stdout.readline()
        if line.startswith(b"{"):
            found: dict[str, Any] = json.loads(line)
            return found
        if not line:
            break
    process.kill()
    assert process.stderr is not None
    last = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise UnavailableError(f"nixl: {last or 'no answer'}")
