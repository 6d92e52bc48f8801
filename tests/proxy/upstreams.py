"""Real HTTP servers that behave as engines do, well or badly, and the proxy as a process before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT, free_port

STORE = "10.0.0.1:9400"


@dataclass
class Seen:
    """A request that an upstream got. ended: "answered", or "cancelled" when the caller went away."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    ended: str = ""


@dataclass
class Upstream:
    """An engine's HTTP side, in a thread of its own.

    How it behaves is set by its fields, at any time. healthy: what /health says. status: of answers.
    delay: seconds before an answer. stop_after: pieces of a stream, or bytes of a body, after which the
    connection is cut. pause: seconds between pieces of a stream. params: what answers say about the transfer.
    """

    healthy: bool = True
    status: int = 200
    delay: float = 0.0
    stop_after: int | None = None
    pause: float = 0.0
    pieces: int = 4
    params: dict[str, Any] | None = None
    seen: list[Seen] = field(default_factory=list)
    checks: int = 0

    def __post_init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Upstream]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        with serving(lambda: app, self.port):
            yield self

    async def _health(self, request: web.Request) -> web.Response:
        self.checks += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, await request.json(), request.headers)
        self.seen.append(seen)
        try:
            await asyncio.sleep(self.delay)
            response = await (self._stream if seen.body.get("stream") else self._whole)(request)
        except asyncio.CancelledError:
            seen.ended = "cancelled"
            raise
        except ConnectionResetError:
            seen.ended = "cancelled"
            raise
        seen.ended = "answered"
        return response

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        page = {"choices": [{"text": "a b c"}], "kv_transfer_params": self.params}
        if self.status != 200:
            page = {"error": {"message": "no", "type": "test", "param": None, "code": self.status}}
        body = json.dumps(page).encode()
        if self.stop_after is None:
            return web.Response(body=body, status=self.status, content_type="application/json")
        response = web.StreamResponse(
            headers={"Content-Length": str(len(body)), "Content-Type": "application/json"}
        )
        await response.prepare(request)
        await response.write(body[: self.stop_after])
        self._cut(request)
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return await self._whole(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(self.pieces):
            if number == self.stop_after:
                self._cut(request)
                return response
            await response.write(b'data: {"choices": [{"text": "%d"}]}\n\n' % number)
            await asyncio.sleep(self.pause)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cut(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()


@contextlib.contextmanager
def serving(make: Callable[[], web.Application], port: int) -> Iterator[None]:
    """An application on a loopback port, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(make(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class ProxyPages:
    """What a proxy says about itself."""

    url: str

    def get(self, path: str) -> str | None:
        """The page, whatever its status; None without an answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return None

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/health") or "{}"))

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name with these labels."""
        families = text_string_to_metric_families(self.get("/metrics") or "")
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"kvsieve_proxy_{name}" and labels.items() <= sample.labels.items()
        )


class ProxyProcess(ProxyPages):
    """`python -m kvsieve_pd.proxy` on a loopback port."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = folder / f"proxy-{port}.log"
        command = [sys.executable, "-m", "kvsieve_pd.proxy", "--listen", f"127.0.0.1:{port}", *flags]
        paths = [str(ROOT / "deploy/pd"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        wait_for(lambda: self.get("/metrics") is not None or self.process.poll() is not None, 30)
        assert self.process.poll() is None, self.log.read_text()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
