"""HTTP for probes, scrapers and people: /healthz, /readyz, /metrics, /status. It changes nothing."""

from __future__ import annotations

import os
from typing import Any

from aiohttp import web
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.errors import SettingsError
from kvsieve_store.server import admin_service
from kvsieve_store.server.core import Core


class HttpServer:
    """Serves one address until close()."""

    def __init__(self, core: Core, registry: CollectorRegistry) -> None:
        self._core = core
        self._registry = registry
        app = web.Application()
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
        site = web.TCPSite(self._runner, address.host, address.port)
        try:
            await site.start()
        except OSError as error:
            # asyncio's own text repeats the address; the resolver's errors have numbers below 0.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise SettingsError(
                f"http: can't listen on {address.host_port}: {reason}; "
                "give another --http, or --http '' for none"
            ) from None
        return TcpAddress(address.host, self._runner.addresses[0][1])

    async def close(self) -> None:
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
