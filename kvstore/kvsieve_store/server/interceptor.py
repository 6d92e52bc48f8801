"""The one place where exceptions become status codes, and where calls are counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, cast

import grpc

from kvsieve_store.errors import KVSieveError
from kvsieve_store.server.metrics import RpcMetrics

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of kvsieve.v1; those of health and reflection stay as they are.

    A KVSieveError ends the call with its code and message. Any other exception is a bug: it is logged with
    its traceback, the caller gets INTERNAL without details, and the store lives on.
    """

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith("/kvsieve.v1."):
            return handler
        name = method.rpartition("/")[2]
        # Attach is the one method that is not unary.
        unary = handler.unary_unary is not None
        make = grpc.unary_unary_rpc_method_handler if unary else grpc.stream_stream_rpc_method_handler
        self._wrapped[method] = make(
            self._wrap(name, cast(Behaviour, handler.unary_unary or handler.stream_stream), timed=unary),
            handler.request_deserializer,
            handler.response_serializer,
        )
        return self._wrapped[method]

    def _wrap(self, name: str, behaviour: Behaviour, timed: bool) -> Behaviour:
        requests, failed, seconds = self._metrics.of(name)

        async def call(request: Any, context: Context) -> Any:
            requests.inc()
            start = perf_counter()
            try:
                return await behaviour(request, context)
            except KVSieveError as error:
                code, details = error.code, str(error)
            except asyncio.CancelledError:
                failed(grpc.StatusCode.CANCELLED)
                raise
            except Exception:
                _log.exception("%s failed", name)
                code, details = grpc.StatusCode.INTERNAL, f"{name} failed inside the store; its log says why"
            finally:
                if timed:
                    seconds.observe(perf_counter() - start)
            failed(code)
            return await context.abort(code, details)

        return call
