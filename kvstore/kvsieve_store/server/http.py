"""HTTP for probes, scrapers and people: /healthz, /readyz, /metrics, /status. It changes nothing."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.errors import SettingsError
from kvsieve_store.server import admin_service
from kvsieve_store.server.core import Core

_MAX_CONNECTIONS = 64
_CONNECTION_SECONDS = 10.0


class _Gate(asyncio.Protocol):
    """Keeps the port's file descriptors few: at most 64 connections, which live for at most 10 s each.

    aiohttp itself waits for the end of a first request for ever.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) >= _MAX_CONNECTIONS:
            transport.abort()
            return
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        asyncio.get_running_loop().call_later(_CONNECTION_SECONDS, transport.abort)


@web.middleware
async def _close_after(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One request a connection."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


class HttpServer:
    """Serves one address until close()."""

    def __init__(self, core: Core, registry: CollectorRegistry) -> None:
        self._core = core
        self._registry = registry
        self._listener: asyncio.Server | None = None
        app = web.Application(middlewares=[_close_after])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/status", self._status),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def start(self, address: TcpAddress) -> TcpAddress:
        """Returns the address with the port that is served. Raises SettingsError when it is taken."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Gate(server), address.host, address.port
            )
        except OSError as error:
            # asyncio's own text repeats the address; the resolver's errors have numbers below 0.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise SettingsError(
                f"http: can't listen on {address.host_port}: {reason}; "
                "give another --http, or --http '' for none"
            ) from None
        return TcpAddress(address.host, self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = self._core.why_not_ready()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _status(self, request: web.Request) -> web.Response:
        page = _as_json(admin_service.status(self._core))
        page["pools"] = [_as_json(pool) for pool in admin_service.pools(self._core)]
        return web.json_response(page)


def _as_json(message: Message) -> dict[str, Any]:
    """Field name -> value: numbers stay numbers, bytes become hex."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, bytes):
            value = value.hex()
        elif not isinstance(value, str | int | float | bool):
            value = list(value)
        result[field.name] = value
    return result
