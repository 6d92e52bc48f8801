"""A prefill host and a decode host, each a store and a real engine, in network namespaces of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvsieve_store.client import AdminClient
from kvsieve_store.errors import KVSieveError
from tests.conftest import ROOT, StoreProcess
from tests.engine.conftest import transfer_config
from tests.proxy.upstreams import wait_for
from tests.two_hosts.net import Host, Net

MODEL = "tiny"
BLOCK = 32
ENGINE_PORT, CONTROL_PORT, PEER_PORT, HTTP_PORT = 8000, 9400, 9401, 9317

_ENVIRON = {
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


class Preloaded:
    """The process that engines are forked from (preloaded.py)."""

    def __init__(self, folder: Path) -> None:
        """Returns at once; it is ready half a minute later."""
        self._log = (folder / "preloaded.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.two_hosts.preloaded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _ENVIRON,
            cwd=ROOT,
        )

    def start(self, args: list[str], netns: str, log: Path) -> int:
        """`vllm` with these arguments; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"args": args, "netns": netns, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> None:
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.strip() == "ready" or line.strip().isdigit():
                return line.strip()
        raise AssertionError(f"no engine can be started; see {self._log.name}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Engine:
    """A real `vllm serve`. endpoint: of its store; None: without the connector."""

    def __init__(
        self,
        preloaded: Preloaded,
        model: Path,
        endpoint: str | None,
        host: Host | None,
        log: Path,
        **extra: Any,
    ) -> None:
        """host: where it runs; None: with the tests. extra: the connector's settings."""
        self._preloaded = preloaded
        self._netns = host.path if host else ""
        self.log = log
        address = host.here if host else "127.0.0.1"
        self.url = f"http://{address}:{ENGINE_PORT}"
        self._args = ["serve", str(model), "--host", address, "--port", str(ENGINE_PORT)]
        self._args += ["--served-model-name", MODEL, "--dtype", "float32", "--block-size", str(BLOCK)]
        # Small chunks: a prefill of several seconds, in many steps.
        self._args += ["--enforce-eager", "--max-model-len", "8192", "--max-num-batched-tokens", "256"]
        self._args += ["--max-num-seqs", "4"]
        if endpoint is not None:
            settings = {"match_timeout_ms": 20_000, "connect_timeout_ms": 20_000} | extra
            settings["handoff_lease_ms"] = 5_000
            self._args += ["--kv-transfer-config", json.dumps(transfer_config(endpoint, **settings))]
        self.pid = 0

    def start(self) -> None:
        """Returns at once; wait() until it serves."""
        self.pid = self._preloaded.start(self._args, self._netns, self.log)

    def wait(self) -> None:
        end = time.monotonic() + 90
        while not self.healthy():
            assert self.alive(), self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def alive(self) -> bool:
        return self.pid != 0 and any(self._processes())

    def kill(self) -> None:
        """kill -9, with its core."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            wait_for(lambda: not self.alive())

    def counter(self, name: str) -> float:
        """Sum of a counter over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def _processes(self) -> Iterator[psutil.Process]:
        """Of its group, and the first one, which may have to make it yet."""
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError):
                own = self.pid in (process.pid, os.getpgid(process.pid))
                if own and process.info["status"] != psutil.STATUS_ZOMBIE:
                    yield process


class Side:
    """A host with its store and its engine."""

    def __init__(self, name: str, host: Host, preloaded: Preloaded, model: Path, folder: Path) -> None:
        self.host = host
        self.address = f"{host.peer}:{CONTROL_PORT}"
        self.store = StoreProcess(
            *("--listen", self.address, "--allow-insecure-tcp", "--peer-listen", f"{host.peer}:{PEER_PORT}"),
            # Shared memory would be quicker, and would not touch the link.
            *("--peer-transports", "tcp", "--pool-size", "128MiB", "--extent-size", "2MiB"),
            *("--segment-size", "64MiB", "--session-timeout", "2"),
            http=f"{host.here}:{HTTP_PORT}",
            netns=host.path,
        )
        self.engine = Engine(preloaded, model, self.store.endpoint, host, folder / f"{name}.log")
        self.admin = AdminClient(self.store.endpoint)

    def mend(self) -> None:
        """What was killed is started again. Engines that were started are not waited for."""
        if self.store.process is None or self.store.process.poll() is not None:
            self.store.start()
        if not self.engine.alive():
            self.engine.start()

    def sealed(self) -> int:
        """Blocks sealed since the store's start, those that were evicted since as well; 0 without one."""
        try:
            return int(self.metric("kvsieve_sealed_blocks_total"))
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        families = text_string_to_metric_families(self.store.metrics())
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def attached(self) -> bool:
        """Whether the engine, and nobody else, is attached."""
        try:
            states = [
                s.state for s in self.admin.list_sessions().sessions if not s.engine_id.startswith("peer")
            ]
        except KVSieveError:
            return False
        return states == ["attached"]

    def leaks(self, of_offers: bool) -> dict[str, float]:
        """What is held for a request that is over; {} when nothing is. of_offers: by offers, too."""
        status, sessions = self.admin.status(), self.admin.list_sessions().sessions
        pools = self.admin.list_pools().pools
        held = sum(s.held_slots for s in sessions)
        offers = self.metric("kvsieve_peer_offers")
        found = {
            "leases": status.leases - (0 if of_offers else offers),
            "slots": float(sum(p.writing_slots for p in pools) - held),
            "fencing": float(sum(s.state != "attached" for s in sessions)),
            "offers": offers if of_offers else 0,
            "waiting offers": self.metric("kvsieve_peer_waiting_offers"),
            "holds": self.metric("kvsieve_peer_holds"),
            "pulls": self.metric("kvsieve_peer_pulls"),
        }
        return {name: count for name, count in found.items() if count}

    def close(self) -> None:
        self.engine.kill()
        self.admin.close()
        self.store.close()


class Cluster:
    """Prefill on host a, decode on host b."""

    def __init__(self, net: Net, prefill: Side, decode: Side) -> None:
        self.net = net
        self.prefill = prefill
        self.decode = decode

    def mend(self) -> None:
        """Link, stores and engines are all there, and the engines attached."""
        self.net.mend()
        for side in (self.prefill, self.decode):
            side.mend()
        for side in (self.prefill, self.decode):
            side.engine.wait()
            wait_for(side.attached, 40)

    def transfers(self) -> Callable[[], bool]:
        """Whether blocks of a request that comes now are on their way between the stores."""
        prefill, before = self.prefill, self.prefill.sealed()
        return lambda: prefill.sealed() > before + 3 and self.decode.metric("kvsieve_peer_pulls") > 0

    def nothing_leaks(self, seconds: float = 30, *, offers: bool = False) -> None:
        """Waits until it is so. offers: also those that a peer which is gone has not taken back."""
        end = time.monotonic() + seconds
        while leaks := {
            s.host.netns: found for s in (self.prefill, self.decode) if (found := s.leaks(offers))
        }:
            assert time.monotonic() < end, leaks
            time.sleep(0.1)


@contextmanager
def cluster(net: Net, preloaded: Preloaded, model: Path, folder: Path) -> Iterator[Cluster]:
    """Both sides, serving."""
    sides = [
        Side(name, host, preloaded, model, folder) for name, host in (("prefill", net.a), ("decode", net.b))
    ]
    both = Cluster(net, *sides)
    try:
        both.mend()
        yield both
    finally:
        for side in sides:
            side.close()
