"""kvsieve.v1.Store: messages in, state machine, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from kvsieve.v1 import store_pb2 as pb
from kvsieve.v1 import store_pb2_grpc
from kvsieve_store.errors import InvalidRequestError, PoolMismatchError
from kvsieve_store.protocol.limits import MAX_BATCH, PROTOCOL_VERSION
from kvsieve_store.server.core import Core
from kvsieve_store.server.streams import SessionStream, credits_message, slot_fields

Context = grpc.aio.ServicerContext[Any, Any]


class StoreService(store_pb2_grpc.StoreServicer):
    """Handlers raise errors of kvsieve_store.errors; the interceptor maps them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    async def Attach(self, request_iterator: object, context: Context) -> None:
        hello = await self._read_hello(context)
        stream = self._core.open_session(hello)
        reader = asyncio.create_task(self._read_heartbeats(stream, context))
        try:
            while (message := await stream.next()) is not None:
                await _write(context, message)
        finally:
            self._core.end_session(stream.session_id, "its stream was closed")
            reader.cancel()

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        match = self._state.match(request.session_id, request.keys, request.lease_ms, self._core.now())
        reply = pb.MatchResponse.FromString(slot_fields(match.slots, match.generations))
        reply.lease_id = match.lease_id
        return reply

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        grant = self._state.reserve(request.session_id, request.count, self._core.now())
        self._core.prepare(request.session_id, grant)
        return pb.ReserveResponse(credits=credits_message(grant))

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:
        sealed = self._core.seal(
            request.session_id,
            request.keys,
            request.parents,
            _array(request.slots),
            _array(request.generations),
            request.lease_ms,
            request.lease_id,
        )
        self._core.prepare(request.session_id, sealed.grant)
        reply = pb.SealResponse(credits=credits_message(sealed.grant), lease_id=sealed.lease_id)
        reply.status.extend(sealed.status.tolist())
        return reply

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        self._core.announce(
            request.session_id,
            request.keys,
            _array(request.slots),
            _array(request.generations),
            request.hold_ms,
        )
        return pb.AnnounceResponse()

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        released = self._state.release(
            request.session_id,
            list(request.lease_ids),
            _array(request.slots),
            _array(request.generations),
            self._core.now(),
        )
        return pb.ReleaseResponse(leases=released.leases, slots=released.slots)

    async def _read_hello(self, context: Context) -> pb.Hello:
        timeout = self._core.settings.session_timeout
        try:
            async with asyncio.timeout(timeout):
                first = await context.read()
        except TimeoutError:
            raise InvalidRequestError(f"hello: nothing received within {timeout:g} s") from None
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            raise InvalidRequestError("hello: must be the first message of an Attach stream")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            raise PoolMismatchError(
                f"hello.protocol_version: {first.hello.protocol_version} given, "
                f"this store speaks {PROTOCOL_VERSION} only; use a client and a store of the same release"
            )
        hello: pb.Hello = first.hello
        return hello

    async def _read_heartbeats(self, stream: SessionStream, context: Context) -> None:
        """Until the client closes its side, or says something wrong."""
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if message.WhichOneof("message") != "heartbeat":
                    raise InvalidRequestError("message: only heartbeats may follow hello")
                leases = message.heartbeat.renew_leases
                if len(leases) > MAX_BATCH:
                    raise InvalidRequestError(
                        f"heartbeat.renew_leases: {len(leases)} given, at most {MAX_BATCH} allowed"
                    )
                self._state.heartbeat(stream.session_id, list(leases), self._core.now())
        except Exception as error:  # Attach raises it.
            stream.end(error)
        else:
            stream.end(None)


async def _write(context: Context, message: pb.AttachResponse) -> None:
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        # The client died while its stream was blocked: gRPC says that it can't send, and nobody hears us.
        raise asyncio.CancelledError from None


def _array(numbers: Collection[int]) -> NDArray[np.uint32]:
    return np.fromiter(numbers, np.uint32, len(numbers))
