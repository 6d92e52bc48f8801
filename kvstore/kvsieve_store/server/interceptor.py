"""The one place where exceptions become status codes, and where calls are counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from kvsieve_store.errors import InvalidRequestError, KVSieveError
from kvsieve_store.server.metrics import RpcMetrics

_log = logging.getLogger(__name__)

_MAX_DETAILS_BYTES = 2048
"""Of an error's message on the wire. gRPC clients refuse a call whose metadata are larger than 8 KiB."""

_ELLIPSIS = "…"

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know of synchronous functions only.


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of kvsieve.v1; those of health and reflection stay as they are.

    A KVSieveError ends the call with its code and message. Any other exception is a bug: it is logged with
    its traceback, the caller gets INTERNAL without details, and the store lives on.
    """

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith("/kvsieve.v1."):
            return handler
        self._wrapped[method] = self._wrap(method.rpartition("/")[2], handler)
        return self._wrapped[method]

    def _wrap(self, name: str, handler: Handler) -> Handler:
        """The same handler, with errors mapped. Attach is the one method that is a stream."""
        requests, failed, seconds = self._metrics.of(name)
        parse = _parser(name, handler.request_deserializer)

        async def call(behaviour: Awaitable[Any], context: Context) -> Any:
            requests.inc()
            try:
                return await behaviour
            except KVSieveError as error:
                code, details = error.code, str(error)
            except asyncio.CancelledError:
                failed(grpc.StatusCode.CANCELLED)
                raise
            except Exception:
                _log.exception("%s failed", name)
                code, details = grpc.StatusCode.INTERNAL, f"{name} failed inside the store; its log says why"
            failed(code)
            return await context.abort(code, shortened(details))

        async def unary(raw: bytes, context: Context) -> Any:
            async def answer() -> Any:
                return await handler.unary_unary(parse(raw), context)

            with seconds.time():
                return await call(answer(), context)

        async def stream(messages: object, context: Context) -> Any:
            return await call(handler.stream_stream(messages, context), context)

        if handler.unary_unary is None:
            return grpc.stream_stream_rpc_method_handler(stream, parse, handler.response_serializer)
        # Parsed here, not by gRPC, whose error for a broken message would be UNKNOWN with a traceback.
        return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)


def shortened(details: str) -> str:
    """A message that takes at most 2,048 bytes once gRPC has percent-encoded it; what is cut ends in '…'."""
    # What can't be sent as UTF-8: names of files, say, that are none.
    details = details.encode("utf-8", "replace").decode()
    room, ends_at = _MAX_DETAILS_BYTES, 0
    for i, character in enumerate(details):
        room -= _encoded_size(character)
        if room < 0:
            return details[:ends_at] + _ELLIPSIS
        if room >= _encoded_size(_ELLIPSIS):
            ends_at = i + 1
    return details


def _encoded_size(character: str) -> int:
    """https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, "Percent-Encoded"."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())


def _parser(method: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_refuse(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            raise InvalidRequestError(f"message: {len(raw)} bytes that are no {method} request") from None

    return parse_or_refuse
