"""What callers and the log see of a call that fails."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.v1 import admin_pb2 as admin
from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.errors import NotFoundError
from kvsieve_store.server.interceptor import shortened
from kvsieve_store.server.store import Store

from .conftest import Engine, until
from .test_http import samples


def encoded_size(text: str) -> int:
    """As gRPC percent-encodes a message."""
    return sum(1 if 32 <= byte <= 126 and byte != 37 else 3 for byte in text.encode())


@given(st.text() | st.builds(lambda text, n: text * n, st.text(min_size=1), st.integers(100, 3000)))
def test_a_message_is_cut_only_where_it_must_be(text: str) -> None:
    short = shortened(text)
    assert encoded_size(short) <= 2048
    if encoded_size(text) <= 2048:
        assert short == text
    else:
        assert short.endswith("…")
        assert text.startswith(short[:-1])
        assert encoded_size(text[: len(short)]) > 2048 - 9


def test_what_is_no_text_is_replaced() -> None:
    assert shortened("a\udc80b") == "a?b"


@pytest.mark.parametrize("message", ["x" * 100_000, "ß%" * 10_000])
async def test_a_long_message_arrives_shortened(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    def fail(*args: object) -> None:
        raise NotFoundError(message)

    monkeypatch.setattr(store.core.state, "list_blocks", fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.admin.ListBlocks(admin.ListBlocksRequest(pool="pool"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == shortened(message)


async def test_a_client_that_dies_while_a_write_is_blocked_counts_as_cancelled(
    engine: Engine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    stream = store.core._streams[engine.session_id]
    large = pb.AttachResponse(credits=pb.Credits(slots=range(200_000)))
    for _ in range(40):
        stream.send(large)

    async def blocked() -> bool:
        waiting = stream._outbox.qsize()
        await asyncio.sleep(0.3)
        return 0 < stream._outbox.qsize() == waiting

    await until(blocked)
    await engine.close()

    async def counted() -> bool:
        return ("kvsieve_rpc_failures_total", "CANCELLED", "Attach") in await samples(store)

    await until(counted)
    assert ("kvsieve_rpc_failures_total", "INTERNAL", "Attach") not in await samples(store)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
