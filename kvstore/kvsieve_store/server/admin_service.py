"""kvsieve.v1.Admin: what operators ask."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc
import psutil

from kvsieve.v1 import admin_pb2 as pb
from kvsieve.v1 import admin_pb2_grpc
from kvsieve_store import __version__
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import DEFAULT_DRAIN_MS
from kvsieve_store.server.core import Core

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_DRAIN_MS = 600_000


class AdminService(admin_pb2_grpc.AdminServicer):
    """Handlers raise errors of kvsieve_store.errors; the interceptor maps them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return status(self._core)

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        rows = self._state.list_sessions(self._core.now())
        return pb.ListSessionsResponse(sessions=[pb.SessionInfo(**asdict(row)) for row in rows])

    async def ListPools(self, request: pb.ListPoolsRequest, context: Context) -> pb.ListPoolsResponse:
        return pb.ListPoolsResponse(pools=pools(self._core))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> pb.ListBlocksResponse:
        page = self._state.list_blocks(request.pool, request.page_size, request.page_token)
        return pb.ListBlocksResponse(
            blocks=[pb.BlockInfo(**asdict(row)) for row in page.blocks], next_page_token=page.next_page_token
        )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        result = self._state.evict(request.pool, request.keys, request.count, self._core.now())
        return pb.EvictResponse(evicted=result.evicted, skipped=result.skipped, unknown=result.unknown)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        result = self._state.pin(request.pool, request.keys)
        return pb.PinResponse(pinned=result.pinned, unknown=result.unknown)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        result = self._state.unpin(request.pool, request.keys)
        return pb.UnpinResponse(unpinned=result.unpinned, unknown=result.unknown)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        result = self._state.clear(request.pool)
        return pb.ClearResponse(dropped=result.dropped, skipped=result.skipped)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        timeout_ms = request.timeout_ms or DEFAULT_DRAIN_MS
        if timeout_ms > _MAX_DRAIN_MS:
            raise InvalidRequestError(f"timeout_ms: {timeout_ms} given, at most {_MAX_DRAIN_MS} allowed")
        return pb.DrainResponse(leases_left=await self._core.drain(timeout_ms / 1000))


def status(core: Core) -> pb.StatusResponse:
    """The page of Admin.Status and of /status."""
    totals = core.state.totals()
    memory = psutil.Process().memory_info()
    return pb.StatusResponse(
        version=__version__,
        instance=core.instance,
        uptime_seconds=core.uptime,
        state=core.phase,
        prefaulted=core.prefaulted,
        arena_bytes=totals.arena_bytes,
        owned_bytes=totals.owned_bytes,
        sealed_bytes=totals.sealed_bytes,
        pools=totals.pools,
        sessions=totals.sessions,
        sealed_blocks=totals.sealed_blocks,
        leases=totals.leases,
        rss_bytes=max(memory.rss - memory.shared, 0),
        listen=core.listening,
        arena_dir=str(core.arena.path),
        **_directory(core),
    )


def _directory(core: Core) -> dict[str, Any]:
    directory = core.directory
    if directory is None:
        return {"directory": "local"}
    return {
        "directory": directory.name,
        "directory_down": directory.down,
        "directory_address": directory.address,
        "directory_queued": directory.queued,
    }


def pools(core: Core) -> list[pb.PoolInfo]:
    """The rows of Admin.ListPools and of /status."""
    return [pb.PoolInfo(**asdict(row)) for row in core.state.list_pools()]
