"""RemoteBlocks: blocks of another store, read in part by this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import grpc

from kvsieve.v1 import peer_pb2 as pb
from kvsieve.v1 import peer_pb2_grpc
from kvsieve_store.client.channel import CHANNEL_OPTIONS, call_error
from kvsieve_store.client.checks import MAX_SECONDS, check_seconds, join_chain
from kvsieve_store.client.endpoint import grpc_target
from kvsieve_store.errors import NotFoundError
from kvsieve_store.protocol.limits import MAX_MATCH_KEYS
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.transport.connect import TRANSPORTS, connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.ucx.engine import Engine


class RemoteBlocks:
    """The blocks stay where they are, leased, until close() or until `seconds` are over.

    blocks: how many of the keys, from the first on, there are to read. slot_bytes: size of each.
    Reads take turns; close() may come from any thread.
    """

    def __init__(
        self,
        source: str,
        spec: PoolSpec,
        keys: bytes | Sequence[bytes],
        memory: Memory,
        *,
        seconds: float = 60.0,
        connect_seconds: float = 10.0,
        engine: Engine | None = None,
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        """source: control address of the store. keys: in chain order, at most 32,768. memory: where reads
        write to. engine: for UCX; any number of these can use one.

        Raises InvalidRequestError, NotFoundError when the store has none of the blocks, UnavailableError,
        CapacityError, LinkError.
        """
        joined = join_chain(keys, MAX_MATCH_KEYS)
        check_seconds("seconds", seconds, MAX_SECONDS)
        check_seconds("connect_seconds", connect_seconds, MAX_SECONDS)
        self._source = source
        self._channel = grpc.insecure_channel(grpc_target(source), options=CHANNEL_OPTIONS)
        self._stub: Any = peer_pb2_grpc.PeerStub(self._channel)  # type: ignore[no-untyped-call]
        self._offer = pb.OfferResponse()
        try:
            request = pb.OfferRequest(
                pool_id=spec.pool_id(),
                keys=joined,
                lease_ms=max(int(seconds * 1000), 1),
            )
            try:
                self._offer = self._stub.Offer(request, timeout=connect_seconds)
            except grpc.RpcError as error:
                raise call_error(error, "Offer", source) from None
            if not self._offer.blocks:
                raise NotFoundError(f"keys: the store at {source} has none of these blocks")
            self.blocks: int = self._offer.blocks
            self.slot_bytes: int = self._offer.slot_bytes
            self._link = connect(
                Description.of(self._offer.description),
                self._offer.token,
                memory,
                time.monotonic() + connect_seconds,
                engine=engine,
                transports=transports,
            )
        except BaseException:
            self._withdraw()
            raise

    @property
    def transport(self) -> str:
        """By which way it reads: "shm", "ucx" or "tcp"."""
        return self._link.transport

    def read(self, ranges: U64Array, into: U64Array, seconds: float = 10.0) -> None:
        """Reads ranges, as many as you like, in one go.

        ranges: [n, 3] uint64: block (by its place among the keys), offset in it, length; transport.rows makes
        those of rows. into: [n] uint64, offset in the memory per range. seconds: the longest it may take.
        Raises as transport.base.Link.read(); after a LinkError only close() is left.
        """
        check_seconds("seconds", seconds, MAX_SECONDS)
        self._link.read(self._offer.token, ranges, into, time.monotonic() + seconds)

    def close(self) -> None:
        """Ends the link, and lets the store have its blocks back. May be called again."""
        self._link.close()
        self._withdraw()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _withdraw(self) -> None:
        offer, self._offer = self._offer, pb.OfferResponse()
        if offer.token:
            with suppress(grpc.RpcError):  # it runs out by itself
                self._stub.Withdraw(pb.WithdrawRequest(token=offer.token), timeout=5)
        self._channel.close()
