"""A real Redis or Valkey, or a cluster of three, started by the tests."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.conftest import free_port

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
CLI = shutil.which("redis-cli") or shutil.which("valkey-cli")


def why_missing() -> str:
    """Why no server can be started; empty if one can."""
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the Python package redis is not installed"
    return "" if SERVER and CLI else "neither redis-server nor valkey-server is on the PATH"


class RedisServer:
    """Keeps nothing on disk: started again, it is empty."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.dir = Path(tempfile.mkdtemp(prefix="kvsieve-redis-"))
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        """Returns once it answers."""
        assert SERVER
        command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.dir)]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self.options]
        log = (self.dir / "log").open("ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                assert self.process.poll() is None, (self.dir / "log").read_text()
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.02)

    def cli(self, *words: str) -> str:
        """The answer to a command."""
        assert CLI
        command = [CLI, "-p", str(self.port), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

    def size(self) -> int:
        """Names in it."""
        return int(self.cli("dbsize"))

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


class RedisCluster:
    """Three nodes that share the keys, without replicas."""

    def __init__(self) -> None:
        self.nodes = [
            RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", port=port)
            for port in _cluster_ports(3)
        ]
        self.url = f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def start(self) -> RedisCluster:
        for node in self.nodes:
            node.start()
        assert CLI
        hosts = [f"127.0.0.1:{node.port}" for node in self.nodes]
        made = subprocess.run(
            [CLI, "--cluster", "create", *hosts, "--cluster-yes"], capture_output=True, text=True, timeout=60
        )
        assert made.returncode == 0, made.stdout + made.stderr
        end = time.monotonic() + 20
        while any("cluster_state:ok" not in node.cli("cluster", "info") for node in self.nodes):
            assert time.monotonic() < end, "the cluster did not come up"
            time.sleep(0.1)
        return self

    def size(self) -> int:
        return sum(node.size() for node in self.nodes)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _cluster_ports(count: int) -> list[int]:
    """Free ones whose bus port, 10,000 higher, is free, too: below where the kernel takes ports from."""
    found: list[int] = []
    for port in random.sample(range(12_000, 22_000), 1000):
        with socket.socket() as one, socket.socket() as bus:
            try:
                one.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports for a cluster")
