"""AdminClient: what operators ask of a store, as plain blocking calls."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from kvsieve.v1 import admin_pb2 as pb
from kvsieve.v1.admin_pb2_grpc import AdminStub
from kvsieve_store.client.channel import CHANNEL_OPTIONS, call_error
from kvsieve_store.client.checks import MAX_TIMEOUT, UINT32, check_seconds, check_text, check_whole, join_keys
from kvsieve_store.client.endpoint import grpc_target
from kvsieve_store.protocol.limits import DEFAULT_DRAIN_MS

_MAX_TEXT = 4096
"""Characters of a pool's name, or a page's token: more than there are."""


class AdminClient:
    """One method per call of the Admin service (proto/kvsieve/v1/admin.proto says what each does).

    `pool` is a name, or 8 or more hex digits of the pool id. Methods raise errors of kvsieve_store.errors:
    UnavailableError when no store answers, NotFoundError, InvalidRequestError.
    """

    def __init__(self, endpoint: str, *, timeout: float = 5.0) -> None:
        """
        endpoint: "unix:///path", "tcp://host:port" or "host:port".
        timeout: deadline of each call, seconds.
        """
        target = grpc_target(endpoint)
        check_seconds("timeout", timeout, MAX_TIMEOUT)
        self.endpoint = endpoint
        self._timeout = timeout
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.StatusResponse:
        response: pb.StatusResponse = self._call("Status", pb.StatusRequest())
        return response

    def list_sessions(self) -> pb.ListSessionsResponse:
        response: pb.ListSessionsResponse = self._call("ListSessions", pb.ListSessionsRequest())
        return response

    def list_pools(self) -> pb.ListPoolsResponse:
        response: pb.ListPoolsResponse = self._call("ListPools", pb.ListPoolsRequest())
        return response

    def list_blocks(self, pool: str, *, page_size: int = 0, page_token: str = "") -> pb.ListBlocksResponse:
        """One page; 0 blocks means the store's default page."""
        check_text("page_token", page_token, _MAX_TEXT)
        request = pb.ListBlocksRequest(
            pool=_pool(pool),
            page_size=_count("page_size", page_size),
            page_token=page_token,
        )
        response: pb.ListBlocksResponse = self._call("ListBlocks", request)
        return response

    def evict(self, pool: str, *, keys: bytes | Sequence[bytes] = b"", count: int = 0) -> pb.EvictResponse:
        """Named blocks, or the `count` coldest: one of both."""
        request = pb.EvictRequest(pool=_pool(pool), keys=join_keys(keys), count=_count("count", count))
        response: pb.EvictResponse = self._call("Evict", request)
        return response

    def pin(self, pool: str, keys: bytes | Sequence[bytes]) -> pb.PinResponse:
        response: pb.PinResponse = self._call("Pin", pb.PinRequest(pool=_pool(pool), keys=join_keys(keys)))
        return response

    def unpin(self, pool: str, keys: bytes | Sequence[bytes] = b"") -> pb.UnpinResponse:
        """No keys: every pin of the pool."""
        response: pb.UnpinResponse = self._call(
            "Unpin", pb.UnpinRequest(pool=_pool(pool), keys=join_keys(keys))
        )
        return response

    def clear(self, pool: str = "") -> pb.ClearResponse:
        """No pool: all pools."""
        response: pb.ClearResponse = self._call("Clear", pb.ClearRequest(pool=_pool(pool)))
        return response

    def drain(self, *, timeout_ms: int = 0) -> pb.DrainResponse:
        """Waits as long as the store does: `timeout_ms`, or the store's default for 0."""
        request = pb.DrainRequest(timeout_ms=_count("timeout_ms", timeout_ms))
        wait = (timeout_ms or DEFAULT_DRAIN_MS) / 1000
        response: pb.DrainResponse = self._call("Drain", request, extra=wait)
        return response

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, request: Any, extra: float = 0.0) -> Any:
        try:
            return getattr(self._stub, name)(request, timeout=self._timeout + extra)
        except grpc.RpcError as error:
            raise call_error(error, name, self.endpoint) from None


def _count(field: str, value: int) -> int:
    """A uint32 of a request. Raises InvalidRequestError."""
    check_whole(field, value, 0, UINT32)
    return value


def _pool(name: str) -> str:
    """Raises InvalidRequestError."""
    check_text("pool", name, _MAX_TEXT)
    return name
