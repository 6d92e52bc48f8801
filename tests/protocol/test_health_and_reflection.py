"""The standard gRPC services: health and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvsieve.v1 import admin_pb2 as admin
from kvsieve_store.arena import Arena
from kvsieve_store.server.store import Store

from .conftest import Engine, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(engine: Engine, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(engine.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", ["", "kvsieve.v1.Store", "kvsieve.v1.Admin"])
async def test_health_follows_the_store(engine: Engine, service: str) -> None:
    assert await health(engine, service) == SERVING
    await engine.seal(1)
    await engine.match(1, lease_ms=60_000)
    drain = engine.admin.Drain(admin.DrainRequest(timeout_ms=60_000))

    async def not_serving() -> bool:
        return await health(engine, service) == NOT_SERVING

    await until(not_serving)
    drain.cancel()


async def test_not_serving_before_the_prefault_is_done(
    make_store: Callable[..., Awaitable[Store]],
    connect: Callable[[str], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Arena, "prefault", lambda arena, progress, stop: stop.wait())
    store = await make_store(ready=False)
    assert await health(connect(store.endpoints[0])) == NOT_SERVING


async def test_an_unknown_service(engine: Engine) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(engine, "other.v1.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(engine: Engine) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(engine.channel)

    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvsieve.v1.Store")

    listed, found = [answer async for answer in stub.ServerReflectionInfo(requests())]
    assert {service.name for service in listed.list_services_response.service} == {
        "kvsieve.v1.Store",
        "kvsieve.v1.Admin",
        "kvsieve.v1.Peer",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert found.file_descriptor_response.file_descriptor_proto
