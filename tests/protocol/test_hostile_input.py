"""Bytes that no client sends. The store refuses them, and serves the next one."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable

import grpc
import pytest

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.addresses import UnixAddress, parse_address
from kvsieve_store.server.store import Store

from .conftest import Engine, fails, key, snapshot

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")

_random = random.Random(7)
GARBAGE = {
    "nothing": b"",
    "zeros": bytes(1000),
    "random": _random.randbytes(100_000),
    "http/1": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a preface": PREFACE[:11],
    "preface": PREFACE,
    "a frame of 16 MiB": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "data on no stream": PREFACE + SETTINGS + bytes.fromhex("000004000100000005") + b"abcd",
    "broken header block": PREFACE + SETTINGS + bytes.fromhex("000010010500000001") + b"\xff" * 16,
    "random frames": PREFACE + SETTINGS + _random.randbytes(10_000),
}


@pytest.fixture
async def store(make_store: Callable[..., Awaitable[Store]], tmp_path) -> Store:
    return await make_store(listen=[f"unix://{tmp_path}/run/kvsieve.sock", "127.0.0.1:0"])


async def throw(endpoint: str, garbage: bytes) -> None:
    """Sends bytes, hangs up its side, and reads until the store hangs up."""
    address = parse_address(endpoint)
    if isinstance(address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(garbage)
        await writer.drain()
        writer.write_eof()
        await reader.read()
    except OSError:
        pass  # the store has hung up before
    finally:
        writer.close()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_on_a_connection(engine: Engine, store: Store, garbage: bytes) -> None:
    before = await snapshot(engine)
    for endpoint in store.endpoints:
        await throw(endpoint, garbage)
    assert await snapshot(engine) == before
    assert await engine.seal(1) == [pb.SEAL_STATUS_SEALED]


@pytest.mark.parametrize("method", ["Match", "Reserve", "Seal", "Release", "Nothing"])
async def test_garbage_instead_of_a_message(engine: Engine, method: str) -> None:
    before = await snapshot(engine)
    call = engine.channel.unary_unary(f"/kvsieve.v1.Store/{method}")
    for size in (1, 10, 1000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff" + os.urandom(size))
        expected = "UNIMPLEMENTED" if method == "Nothing" else "INVALID_ARGUMENT"
        assert caught.value.code().name == expected
    assert await snapshot(engine) == before


async def test_garbage_on_an_attach_stream(engine: Engine) -> None:
    before = await snapshot(engine)
    call = engine.channel.stream_stream("/kvsieve.v1.Store/Attach")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await snapshot(engine) == before


async def test_a_message_that_is_too_long(engine: Engine) -> None:
    before = await snapshot(engine)
    request = pb.MatchRequest(session_id=engine.session_id, keys=bytes(8 << 20))
    await fails(engine.store.Match(request), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")
    assert await snapshot(engine) == before


async def test_fields_of_a_later_version_are_ignored(engine: Engine) -> None:
    await engine.seal(1)
    request = pb.MatchRequest(session_id=engine.session_id, keys=key(1)).SerializeToString()
    unknown_field_99 = bytes.fromhex("9a0603616263")
    answer = await engine.channel.unary_unary("/kvsieve.v1.Store/Match")(request + unknown_field_99)
    assert len(pb.MatchResponse.FromString(answer).slots) == 1


async def test_many_connections_that_say_nothing(engine: Engine, store: Store) -> None:
    address = parse_address(store.endpoints[0])
    assert isinstance(address, UnixAddress)
    idle = [await asyncio.open_unix_connection(address.path) for _ in range(100)]
    assert await engine.seal(1) == [pb.SEAL_STATUS_SEALED]
    for _, writer in idle:
        writer.close()
