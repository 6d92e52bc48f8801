"""Coming: the blocks of an offer that are still being written, at the store that has them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import numpy as np

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import CapacityError, InvalidRequestError
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.protocol.limits import KEY_BYTES
from kvsieve_store.protocol.slot_map import SlotMap
from kvsieve_store.server.core import Core, InnerSession
from kvsieve_store.state import U32Array
from kvsieve_store.transport.exports import Growing

MAX_COMING = 256
"""Blocks of one offer."""

MAX_COMING_OFFERS = 32
"""That have such blocks, at a time."""

POLL_SECONDS = 0.005
"""How often the words of writers are looked at while somebody waits for them."""

STATE_SECONDS = 0.05
"""How often it is looked whether the blocks still come; seals are told at once."""

MAX_FOLLOW_MS = 60_000

_GROUP = 8
"""Blocks whose digests are told together: their hashes take all the threads there are."""


class Coming:
    """Runs in the event loop's thread. The slots are leased by the offer's session, and so not granted again
    while it lasts, whatever becomes of their writer."""

    def __init__(
        self,
        core: Core,
        plane: DataPlane,
        session: InnerSession,
        token: bytes,
        keys: bytes,
        slots: U32Array,
        growing: Growing,
    ) -> None:
        """keys: of the slots, end to end. growing: of the offer's export, kept up to date from here."""
        self._core, self._plane = core, plane
        self._session, self._token = session, token
        self._keys, self._slots, self._growing = keys, slots, growing
        self._count = len(slots)
        self._sealed = 0
        self._digests: list[bytes] = []
        self._hashing: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._is_followed = False
        self._looked = 0.0
        self._look(asyncio.get_running_loop().time())

    def touch(self) -> None:
        """Blocks were sealed, these perhaps: who waits looks at once."""
        self._moved.set()

    def close(self) -> None:
        """The offer is over."""
        self._count = self._sealed = 0
        self._moved.set()
        if self._hashing is not None:
            self._hashing.cancel()

    async def follow(self, request: pb.FollowRequest) -> pb.FollowResponse:
        """Raises what kvsieve.v1.Peer.Follow says."""
        if not request.step:
            raise InvalidRequestError("step: 0 given, 1 or more required")
        if request.wait_ms > MAX_FOLLOW_MS:
            raise InvalidRequestError(f"wait_ms: {request.wait_ms} given, 0 to {MAX_FOLLOW_MS} allowed")
        if self._is_followed:
            raise CapacityError("token: another call follows this offer; one at a time")
        self._is_followed = True
        try:
            return await self._follow(request)
        finally:
            self._is_followed = False

    async def _follow(self, request: pb.FollowRequest) -> pb.FollowResponse:
        loop = asyncio.get_running_loop()
        end = loop.time() + request.wait_ms / 1000
        while True:
            now = loop.time()
            self._look(now)
            left = end - now
            layers = self._growing.layers[request.done : self._count].tolist()
            more, digests = sum(layers) - request.seen, self._digests[request.done :]
            news = more >= request.step or (more > 0 and self._sealed > request.done)
            if news or digests or len(layers) < request.known or left <= 0:
                return pb.FollowResponse(layers=layers, digests=b"".join(digests))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, POLL_SECONDS)):
                    await self._moved.wait()

    def _look(self, now: float) -> None:
        """What has become of the blocks. now: seconds, on the loop's clock."""
        is_told, core, order = self._moved.is_set(), self._core, self._growing.order
        self._moved.clear()
        if self._sealed == self._count:
            return
        if is_told or now >= self._looked + STATE_SECONDS:
            self._looked = now
            keys, slots = self._keys[: self._count * KEY_BYTES], self._slots[: self._count]
            self._sealed, self._count = core.state.progress(self._session.session.pool_id, keys, slots)
        layers = self._growing.layers[: self._count]
        words = core.arena.layers_done(self._session.layout, self._slots[: self._count])
        np.maximum(layers, order.complete(words), out=layers)
        layers[: self._sealed] = order.sealed
        if self._hashing is None and len(self._digests) < self._sealed:
            self._hashing = asyncio.create_task(self._hash())

    async def _hash(self) -> None:
        """Digests of what is sealed: of bytes that nobody changes any more."""
        export = self._plane.exports.begin(self._token)  # the blocks stay until the threads are done
        try:
            while len(self._digests) < self._sealed:
                first = self._growing.first + len(self._digests)
                last = min(first + _GROUP, self._growing.first + self._sealed)
                offsets = export.offsets[first:last].tolist()
                self._digests += await asyncio.gather(*map(self._digest, offsets))
                self._moved.set()
        finally:
            self._hashing = None
            self._plane.exports.end(export)

    async def _digest(self, offset: int) -> bytes:
        whole = SlotMap.whole(self._session.layout.slot_bytes)
        call = partial(self._plane.digest, offset, whole.source, whole.length)
        return await in_thread(self._plane.hashers, call)
