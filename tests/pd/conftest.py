"""Two hosts on one machine: a store and an engine each, in processes of their own, on loopback."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsieve_store.client.admin import AdminClient
from tests.conftest import StoreProcess, free_port

WAIT = 120.0
BLOCK = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


class Engine:
    """One engine; answers come in any order and are kept by request."""

    def __init__(self, model: Path, endpoint: str = "", **settings: Any) -> None:
        command = [sys.executable, str(Path(__file__).parent / "engine_process.py")]
        self.process = subprocess.Popen(
            [*command, str(model), endpoint, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        )
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answers: dict[str, dict[str, Any]] = {}
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self) -> Engine:
        self._next(lambda said: "ready" in said, 2 * WAIT)
        return self

    def start(self, prompt: list[int], max_tokens: int = 8, **params: Any) -> str:
        """Sends a request with these kv_transfer_params; returns its id."""
        self._number += 1
        name = f"r{self._number}"
        self._tell(do="add", id=name, prompt=prompt, max_tokens=max_tokens, params=params)
        return name

    def answer(self, name: str) -> dict[str, Any]:
        while name not in self._answers:
            self._next(lambda said: said.get("id") == name)
        return self._answers.pop(name)

    def ask(self, prompt: list[int], max_tokens: int = 8, **params: Any) -> dict[str, Any]:
        return self.answer(self.start(prompt, max_tokens, **params))

    def abort(self, name: str) -> None:
        self._tell(do="abort", id=name)

    def state(self) -> dict[str, Any]:
        """counters, computed prompt tokens, what is left of requests, whether a store is attached."""
        self._tell(do="counters")
        return self._next(lambda said: "counters" in said)

    @property
    def computed(self) -> int:
        """Prompt tokens computed so far."""
        return int(self.state()["computed"])

    def count(self, name: str) -> float:
        return float(self.state()["counters"].get(name, 0))

    def wait_attached(self) -> None:
        end = time.monotonic() + WAIT
        while not self.state()["attached"]:
            assert time.monotonic() < end, "not attached"
            time.sleep(0.05)

    def settled(self) -> None:
        """No request, copy or hand-off is left."""
        end = time.monotonic() + WAIT
        while self.state()["left"]:
            assert time.monotonic() < end, self.state()
            time.sleep(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self._tell(do="stop")
                self.process.wait(60)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()

    def _tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _next(self, wanted: Callable[[dict[str, Any]], bool], seconds: float = WAIT) -> dict[str, Any]:
        while True:
            said = self._said.get(timeout=seconds)
            assert said is not None, f"the engine ended: {self.process.poll()}"
            if "id" in said:
                self._answers[said["id"]] = said
            if wanted(said):
                return said

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put(None)


class Host:
    """A store that serves peers over TCP, and an engine on it."""

    def __init__(self, model: Path, transport: str, **settings: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        flags = ("--listen", self.address, "--peer-listen", "127.0.0.1:0", "--peer-transports", transport)
        self.store = StoreProcess(*flags).start()
        own = {"match_timeout_ms": 20_000, **settings.pop("kvsieve", {})}
        self.engine = Engine(model, self.store.endpoint, kvsieve=own, **settings)

    def metric(self, name: str) -> float:
        """Sum of the samples of one of the store's metrics."""
        lines = [
            line for line in self.store.metrics().splitlines() if line.partition("{")[0].split(" ")[0] == name
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def clear(self) -> None:
        """Drops all blocks."""
        with AdminClient(self.store.endpoint) as admin:
            admin.clear("")

    def settled(self) -> None:
        """Nothing is leased, offered, pulled or waited for; the engine alone holds slots, for its credits."""
        self.engine.settled()
        end = time.monotonic() + WAIT
        names = (
            "leases",
            "peer_offers",
            "peer_waiting_offers",
            "peer_pulls",
            "peer_holds",
            "fencing_sessions",
        )
        while any(self.metric(f"kvsieve_{name}") for name in names) or self.metric("kvsieve_sessions") > 1:
            assert time.monotonic() < end, self.store.metrics()
            time.sleep(0.05)

    def close(self) -> None:
        self.engine.close()
        self.store.close()


@pytest.fixture(scope="module")
def plain(tiny_qwen3: Path) -> Iterator[Engine]:
    """An engine alone, without a store."""
    engine = Engine(tiny_qwen3, dtype="float32", enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def hosts(tiny_qwen3: Path) -> Iterator[tuple[Host, Host]]:
    """The prefill host, whose prompts take several steps, and the decode host."""
    args = {"dtype": "float32", "enable_prefix_caching": False}
    lease = {"handoff_lease_ms": 3_000}
    prefill = Host(tiny_qwen3, "tcp", **args, max_num_batched_tokens=256, kvsieve=lease)
    decode = Host(tiny_qwen3, "tcp", **args)
    for host in (prefill, decode):
        host.engine.wait_ready()
        host.engine.wait_attached()
    yield prefill, decode
    decode.close()
    prefill.close()
