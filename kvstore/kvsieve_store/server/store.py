"""The life of a store: start, prefault, serve, stop."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsieve.v1 import admin_pb2, admin_pb2_grpc, peer_pb2, peer_pb2_grpc, store_pb2, store_pb2_grpc
from kvsieve_store import __version__
from kvsieve_store.addresses import TcpAddress, UnixAddress
from kvsieve_store.arena import Arena
from kvsieve_store.directory.directory import Directory
from kvsieve_store.errors import SettingsError, UnavailableError
from kvsieve_store.peers.peers import Peers
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.server import sockets
from kvsieve_store.server.admin_service import AdminService
from kvsieve_store.server.core import Core
from kvsieve_store.server.http import HttpServer
from kvsieve_store.server.interceptor import CallInterceptor
from kvsieve_store.server.metrics import RpcMetrics, registry_of
from kvsieve_store.server.peer_service import PeerService
from kvsieve_store.server.store_service import StoreService
from kvsieve_store.settings import StoreSettings
from kvsieve_store.sizes import exact_size

_log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_FENCING_SECONDS = 0.05
_STOP_GRACE_SECONDS = 2.0
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Clients may ping through quiet times; other stores do so every second.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
)
_SERVICES = (
    store_pb2.DESCRIPTOR.services_by_name["Store"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name,
)


class Store:
    """A store in this process, from `async with` to the end of the block.

    http_address: where HTTP is served, the real port included; None when it is off.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self.http_address: TcpAddress | None = None
        self._core: Core | None = None
        self._exits = AsyncExitStack()
        self._prefault: asyncio.Task[None] | None = None
        self._stop_prefault = threading.Event()
        self._stop_requested = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def core(self) -> Core:
        """What the services share; there once the store has started."""
        assert self._core is not None
        return self._core

    @property
    def endpoints(self) -> list[str]:
        """Addresses that are served, real ports included, as clients take them."""
        return self.core.listening

    async def __aenter__(self) -> Self:
        """Starts to serve; prefaults behind it. Raises KVSieveError, and has left nothing behind then."""
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exits.aclose()
        _log.info("stopped")

    async def wait_until_ready(self) -> None:
        """Until engines can attach. Raises CapacityError when the prefault failed."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_until_stop(self) -> None:
        """Until request_stop() or the end of a drain. Raises what made it impossible to go on."""
        await self._stop_requested.wait()
        if self._failure is not None:
            raise self._failure

    def request_stop(self) -> None:
        """Lets wait_until_stop() return. For signal handlers."""
        self._stop_requested.set()

    async def _start(self) -> None:
        settings = self.settings
        for address in settings.addresses:
            if isinstance(address, UnixAddress):
                lock = sockets.claim(address.path)
                self._exits.callback(lock.close)
        directory = Directory(settings) if settings.directory != "local" else None
        if directory is not None:
            self._exits.push_async_callback(directory.close)
        arena = Arena.create(
            settings.hugepages or settings.shm_dir,
            settings.pool_size,
            settings.extent_size,
            settings.segment_size,
            store=str(settings.addresses[0]),
            hugetlbfs=settings.hugepages is not None,
            numa_node=settings.numa_node,
        )
        self._exits.callback(arena.close)
        self._exits.push_async_callback(self._end_prefault)
        core = self._core = Core(settings, arena, self._stop_requested, directory=directory)
        self._exits.callback(core.close)
        self._exits.push_async_callback(self._end_peers, core)
        registry = registry_of(core)
        if settings.http_address is not None:
            http = HttpServer(core, registry)
            self._exits.push_async_callback(http.close)
            self.http_address = await http.start(settings.http_address)
        await self._start_grpc(core, CallInterceptor(RpcMetrics(registry)))
        _log.info(
            "kvsieve %s serves %s; http %s; arena %s, %s",
            __version__,
            ", ".join(core.listening),
            self.http_address.host_port if self.http_address else "off",
            arena.path,
            exact_size(arena.size),
        )
        for job in (self._tick(core), self._watch_fencing(core), self._get_ready(core)):
            self._run_behind(asyncio.create_task(job))

    async def _start_grpc(self, core: Core, interceptor: CallInterceptor) -> None:
        server = grpc.aio.server(interceptors=[interceptor], options=_GRPC_OPTIONS)
        self._health = health.aio.HealthServicer()
        await self._set_health(serving=False)
        store_pb2_grpc.add_StoreServicer_to_server(StoreService(core), server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(core), server)  # type: ignore[no-untyped-call]
        peer_pb2_grpc.add_PeerServicer_to_server(PeerService(core), server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        for address in self.settings.addresses:
            if isinstance(address, UnixAddress):
                self._exits.callback(sockets.bind(server, address))
                core.listening.append(str(address))
            else:
                core.listening.append(str(_bind(server, address)))
        await server.start()

        async def stop() -> None:
            core.close_streams(UnavailableError("the store has stopped"))
            await self._health.enter_graceful_shutdown()
            await server.stop(_STOP_GRACE_SECONDS)

        self._exits.push_async_callback(stop)

    async def _get_ready(self, core: Core) -> None:
        """Prefaults, or reserves, then opens for engines, and closes for them when a drain begins."""
        loop = asyncio.get_running_loop()

        def progress(share: float) -> None:
            loop.call_soon_threadsafe(setattr, core, "prefaulted", share)

        arena, stop = core.arena, self._stop_prefault
        self._prefault = asyncio.create_task(
            asyncio.to_thread(arena.prefault, progress, stop)
            if self.settings.prefault
            else asyncio.to_thread(arena.reserve, stop)
        )
        try:
            await asyncio.shield(self._prefault)
            plane = await asyncio.to_thread(DataPlane, self.settings, arena)
            core.peers = Peers(core, plane)
            if core.directory is not None:
                core.directory.start(core.peer_address, core.state.walk)
        except Exception as error:
            self._failure = error
            self._ready.set()
            self.request_stop()
            return
        if core.phase == "prefaulting":
            core.phase = "ready"
            await self._set_health(serving=True)
            _log.info("ready")
        self._ready.set()
        await core.draining.wait()
        await self._set_health(serving=False)

    async def _end_prefault(self) -> None:
        """Threads must be out of the arena before it is unmapped."""
        self._stop_prefault.set()
        if self._prefault is not None:
            await asyncio.wait([self._prefault])

    async def _end_peers(self, core: Core) -> None:
        if core.peers is not None:
            await core.peers.close()

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in ("", *_SERVICES):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def _tick(self, core: Core) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                core.tick()
                if core.peers is not None:
                    core.peers.tick()
            except Exception:
                _log.exception("the tick failed")

    async def _watch_fencing(self, core: Core) -> None:
        while True:
            await core.has_fencing.wait()
            await asyncio.sleep(_FENCING_SECONDS)
            try:
                core.check_fencing()
            except Exception:
                _log.exception("the check of lock files failed")

    def _run_behind(self, task: asyncio.Task[None]) -> None:
        async def stop() -> None:
            task.cancel()
            await asyncio.wait([task])

        self._exits.push_async_callback(stop)


def _bind(server: grpc.aio.Server, address: TcpAddress) -> TcpAddress:
    """Listens on an address; returns it with its real port. Raises SettingsError."""
    try:
        return TcpAddress(address.host, server.add_insecure_port(address.host_port))
    except RuntimeError:
        raise SettingsError(f"listen: can't listen on {address}; is the address in use?") from None
