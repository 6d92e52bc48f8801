"""HTTP: paths, limits, answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvsieve_pd.proxy import health
from kvsieve_pd.proxy.errors import BadRequest, ProxyError, UpstreamFailed
from kvsieve_pd.proxy.flows import Call, Flows
from kvsieve_pd.proxy.instances import Pool
from kvsieve_pd.proxy.metrics import Metrics
from kvsieve_pd.proxy.params import Body
from kvsieve_pd.proxy.settings import ProxySettings
from kvsieve_pd.proxy.upstream import Upstream

_log = logging.getLogger(__name__)

_NOT_FORWARDED = frozenset(
    {"host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect", "connection"}
    | {
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of this connection, or of a body that is written anew (RFC 9110, section 7.6.1)."""


class Proxy:
    """The application; run it with web.run_app(proxy.app, handler_cancellation=True)."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.metrics = Metrics()
        self.prefill = Pool("prefill", settings.prefill, settings.fails, self.metrics)
        self.decode = Pool("decode", settings.decode, settings.fails, self.metrics)
        self._under_way = 0
        self.app = web.Application(client_max_size=settings.max_body, middlewares=[_as_json])
        self.app.cleanup_ctx.append(self._upstreams)
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.app.router.add_post(path, self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)

    async def _upstreams(self, app: web.Application) -> AsyncIterator[None]:
        """While the application runs: one session to all engines, and their checks."""
        settings = self._settings
        limits = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=limits,
            auto_decompress=True,
            read_bufsize=1 << 18,
        ) as session:
            self._session = session
            upstream = Upstream(session, settings)
            self._flows = Flows(self.prefill, self.decode, upstream, settings, self.metrics)
            async with health.checked((self.prefill, self.decode), session, settings):
                yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self._under_way >= self._settings.max_requests:
            raise ProxyError(
                429, "rate_limit_error", f"{self._under_way} requests are under way, which is the limit"
            )
        started, outcome, call = time.monotonic(), "error", None
        self._under_way += 1
        try:
            with self.metrics.under_way.track_inprogress():
                call = Call(request.path, await _body(request), _headers(request))
                response, outcome = await self._relay(request, call, started)
                return response
        except BadRequest:
            outcome = "refused"
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "disconnected"
            raise
        finally:
            self._under_way -= 1
            self.metrics.requests.labels(call.flow if call else "none", outcome).inc()
            self.metrics.seconds.observe(time.monotonic() - started)

    async def _relay(
        self, request: web.Request, call: Call, started: float
    ) -> tuple[web.StreamResponse, str]:
        """The response, and the outcome that is counted."""
        stream: web.StreamResponse | None = None
        try:
            async with self._flows.answer(call) as answer:
                self.metrics.first_byte.observe(time.monotonic() - started)
                headers = {"Content-Type": answer.content_type, "X-Request-Id": call.headers["X-Request-Id"]}
                if not (answer.streamed and answer.status == 200):
                    response = web.Response(body=answer.first, status=answer.status, headers=headers)
                    return response, "ok" if answer.status == 200 else "refused"
                stream = web.StreamResponse(headers=headers | {"Cache-Control": "no-cache"})
                await stream.prepare(request)
                await self._write(stream, answer.first)
                async for piece in answer.rest():
                    await self._write(stream, piece)
        except UpstreamFailed as error:
            if stream is None:
                raise
            # Its status is gone already: the failure is the last event, and there is no [DONE].
            _log.warning("%s: %s", call.headers["X-Request-Id"], error)
            await self._write(stream, error.event())
            stream.force_close()
            return stream, "broken"
        return stream, "ok"

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """A client that takes nothing for too long is gone. Raises ConnectionResetError."""
        try:
            async with asyncio.timeout(self._settings.idle_timeout):
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None

    async def _models(self, request: web.Request) -> web.Response:
        instance = self.decode.choose()
        try:
            async with (
                asyncio.timeout(self._settings.connect_timeout + self._settings.health_timeout),
                self._session.get(f"{instance.url}/v1/models", headers=_headers(request)) as response,
            ):
                body = await response.read()
                return web.Response(body=body, status=response.status, content_type="application/json")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed(f"{instance.url} did not answer: {error or 'too late'}") from None

    async def _health(self, request: web.Request) -> web.Response:
        """503 unless an answer can be had; "degraded" when decode has to compute the prompts, too."""
        pools = (self.prefill, self.decode)
        page: Body = {
            pool.role: [
                {"url": i.url, "up": i.up, "requests": i.outstanding, "store": i.store}
                for i in pool.instances
            ]
            for pool in pools
        }
        missing = [pool.role for pool in pools if pool.instances and not pool.up]
        page["status"] = "down" if "decode" in missing else "degraded" if missing else "ok"
        return web.json_response(page, status=503 if page["status"] == "down" else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        page = generate_latest(self.metrics.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _body(request: web.Request) -> Body:
    """Raises BadRequest, or ProxyError when there is too much of it."""
    text = await request.read()
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body is a JSON {type(value).__name__}, an object expected")
    return value


def _headers(request: web.Request) -> dict[str, str]:
    """What goes on to engines. Both get the same X-Request-Id."""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED}
    listed = {name.strip().lower() for name in request.headers.get("Connection", "").split(",")}
    headers = {name.title(): value for name, value in headers.items() if name.lower() not in listed}
    return {"X-Request-Id": uuid.uuid4().hex} | headers


@web.middleware
async def _as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as OpenAI's clients read them."""
    try:
        return await handler(request)
    except ProxyError as error:
        failure = error
    except web.HTTPRequestEntityTooLarge:
        limit = request.app._client_max_size
        failure = ProxyError(
            413, "invalid_request_error", f"the body is longer than {limit:,} bytes, the limit"
        )
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        failure = ProxyError(error.status, "invalid_request_error", text)
    headers = {"Retry-After": "1"} if failure.status in (429, 503) else {}
    return web.json_response(failure.body(), status=failure.status, headers=headers)
