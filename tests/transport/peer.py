"""A peer store's data plane in a process of its own, without the store: `python -m tests.transport.peer
SIZE`.

Its memory is a file that holds pattern(SIZE). It prints a JSON line with its description and a token for
blocks of 64 KiB, all of the memory; a line "close" on standard input takes the token back, the end of input
ends it.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.transport.description import Description, Segment
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.shm import boot_id
from kvsieve_store.transport.tcp import TcpListener
from kvsieve_store.transport.ucx.engine import Engine
from kvsieve_store.transport.ucx.listener import UcxListener

BLOCK = 64 << 10

LOOPBACK = {"NET_DEVICES": "lo"}
"""Settings of UCX: it stays on this host."""


def pattern(size: int) -> np.ndarray:
    """uint8 [size], the same in every process, with no two blocks alike."""
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


class Peer:
    """The process, and what it said."""

    def __init__(self, size: int, *arguments: str) -> None:
        self.size = size
        command = [sys.executable, "-m", "tests.transport.peer", str(size), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        said: dict[str, Any] = {}
        assert self.process.stdout is not None
        while "token" not in said:  # UCX may have something to say first
            line = self.process.stdout.readline()
            assert line, "the peer died"
            if line.startswith(b"{"):
                said = json.loads(line)
        self.description = Description.of(said["description"].encode())
        self.token = base64.b64decode(said["token"])

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def hear(self) -> str:
        """What it says next, without what UCX has to say in between."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith(b"["):
            pass
        return line.decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main(size: int, tls: str = "") -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "memory"
        path.write_bytes(pattern(size).tobytes())
        with path.open("r+b") as file:
            buffer = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        exports = Exports(Memory([buffer]))
        listener = TcpListener(exports, TcpAddress("127.0.0.1", 0))
        there = os.stat(path)
        segment = Segment(path=str(path), size=size, device=there.st_dev, inode=there.st_ino)
        engine = Engine(tls, LOOPBACK) if tls else None
        ucx = UcxListener(engine, exports, send_seconds=2.0) if engine else None
        description = Description(
            tcp=listener.address.host_port,
            host=boot_id(),
            segments=(segment,),
            ucx=ucx.description if ucx else None,
        )
        token = exports.open(np.arange(0, size, BLOCK, dtype=np.uint64), BLOCK)
        said = {"description": description.pack().decode(), "token": base64.b64encode(token).decode()}
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            if line == "close\n":
                exports.close(token, lambda: print("drained", flush=True))
            elif line == "links\n":
                print(listener.links + (ucx.links if ucx else 0), flush=True)
        listener.close()
        if ucx and engine:
            ucx.close()
            engine.close()
        print("ended", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
