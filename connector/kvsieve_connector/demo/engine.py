"""`vllm serve` as a child process, and the requests that the demo sends to it."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvsieve_connector.demo.processes import Child, DemoError, free_port

_START_SECONDS = 300.0
_REQUEST_SECONDS = 600.0
_ANSWER_TOKENS = 32

_ENVIRON = {
    # GiB for KV on the CPU backend. Without a cap it takes most of the machine's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Answer:
    """text: what the model said. ttft: seconds to the first token. prompt_tokens: as the engine counts."""

    text: str
    ttft: float
    prompt_tokens: int


class Engine:
    """A running vLLM engine on a loopback port."""

    def __init__(
        self, model: Path, endpoint: str, log: Path, name: str = "engine", cores: Sequence[int] = ()
    ) -> None:
        """Starts it; start() waits. endpoint: of the store. name: for messages. cores: that the model runs on
        without a GPU; vLLM's choice when empty."""
        self._name = model.name
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        transfer = {
            "kv_connector": "KVSieveConnector",
            "kv_connector_module_path": "kvsieve_connector.connector",
            "kv_role": "kv_both",
            # A machine with few cores, busy with two engines' worth of start-up, may answer late.
            "kv_connector_extra_config": {"kvsieve.endpoint": endpoint, "kvsieve.match_timeout_ms": 10_000},
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", self._name]
        command += ["--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "4"]
        # Lines for each look at its health and metrics would bury what it says of itself.
        command += ["--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(transfer)]
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}
        self.child = Child(name, command, log, os.environ | _ENVIRON | bound)

    def start(self) -> None:
        """Waits until it serves. Raises DemoError."""
        self.child.wait_until(self._healthy, _START_SECONDS)

    def warm_up(self) -> None:
        """A short request, so that what is done once a process is not counted in the next one's TTFT."""
        self.ask("Say hello.", max_tokens=4)

    def count_tokens(self, text: str) -> int:
        return int(self._post("/tokenize", {"model": self._name, "prompt": text})["count"])

    def ask(self, prompt: str, max_tokens: int = _ANSWER_TOKENS, proxy: str = "") -> Answer:
        """Streams the most likely answer. proxy: URL that is asked in the engine's place. Raises
        DemoError."""
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, ttft, prompt_tokens = "", 0.0, 0
        started = time.monotonic()
        try:
            with self._open("/v1/chat/completions", body, proxy) as lines:
                for line in lines:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise DemoError(f"the engine answered: {event['error']}", self.child.log)
                    delta = "".join(c["delta"].get("content") or "" for c in event["choices"])
                    if delta and not text:
                        ttft = time.monotonic() - started
                    text += delta
                    prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        return Answer(text.strip(), ttft, prompt_tokens)

    def counter(self, name: str) -> float:
        """Sum of a Prometheus counter of the engine over its labels; 0 when there is none of that name."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
                page = answer.read().decode()
        except OSError as error:
            raise self._failed(error) from error
        families = text_string_to_metric_families(page)
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            with self._open(path, body) as answer:
                return json.load(answer)
        except OSError as error:
            raise self._failed(error) from error

    def _open(self, path: str, body: dict[str, Any], proxy: str = "") -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request((proxy or self.url) + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=_REQUEST_SECONDS)

    def _failed(self, error: Exception) -> DemoError:
        detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        return DemoError(f"the engine did not answer: {error} {detail}".strip(), self.child.log)


def wait_for(value: Callable[[], float], enough: float, timeout: float) -> float:
    """Polls until `value` has reached `enough`; returns the last one when the time is up."""
    deadline = time.monotonic() + timeout
    while (now := value()) < enough and time.monotonic() < deadline:
        time.sleep(0.1)
    return now
