"""Following: blocks that are still being written at another store, read layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from blake3 import blake3

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.peers.links import PeerLinks
from kvsieve_store.peers.plane import DIGEST_BYTES, SHORT_BYTES, DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.protocol.layers import LayerOrder
from kvsieve_store.state import Grant
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import U64Array

_STEPS = 8
"""Reads of a batch of blocks, about: the last one, behind the seal, is the smaller the more there are."""

_HASHING = 2
"""Threads that hash what one read has brought."""


class Following:
    """Some blocks of one offer, and what is here of them. What was read is hashed at once, as far as it has
    no gap, so that little is left to do when a block is sealed.

    source: control address of the store. pool_id: of the pool here. left: blocks that are not over; known:
    the same with those that got no slot. done: of the blocks, from the first on, those that are over.
    has_slots: whether take() was called; before, nothing can be read. early: bytes read before their block
    was known to be sealed.
    """

    def __init__(
        self,
        links: PeerLinks,
        plane: DataPlane,
        order: LayerOrder,
        origin: tuple[str, bytes],
        offer: tuple[Description, bytes],
        places: tuple[int, int],
        count: int,
    ) -> None:
        """origin: source and pool_id. offer: its description and token. places: of the first block in it, and
        among the coming ones. count: blocks."""
        self._links, self._plane, self._order = links, plane, order
        self.source, self.pool_id = origin
        self._description, self._token = offer
        self._first, self._behind = places
        self._grant, self._places = Grant.none(), np.zeros(0, np.uint64)
        self._layers, self._beyond = np.zeros(count, np.int64), np.zeros(0, np.int64)
        self._hashes: list[blake3] = []
        self._hashed: list[int] = []
        self.has_slots = False
        self.done = 0
        self.early = 0

    @property
    def left(self) -> int:
        return len(self._layers) - self.done

    @property
    def known(self) -> int:
        return self.left + len(self._beyond)

    @property
    def rest(self) -> Grant:
        """Slots of the blocks that are not over."""
        return self._grant_of(self.done, len(self._grant))

    def take(self, grant: Grant, places: U64Array, reply: pb.FollowResponse) -> None:
        """Slots for the blocks, or for the first of them: the others are left out. places: in the memory.
        reply: the first with news, which is cut to the blocks with slots."""
        count = len(grant)
        self._grant, self._places = grant, places
        self._layers, self._beyond = self._layers[:count], self._layers[count:].copy()
        self._hashes = [blake3() for _ in range(count)]
        self._hashed = [0] * count
        self.has_slots = True
        self._cut(reply)

    def request(self, wait_seconds: float) -> pb.FollowRequest:
        layers = self._layers[self.done :]
        seen, all_there = int(layers.sum()), len(layers) * (self._order.sealed - 1)
        missing = all_there - seen
        return pb.FollowRequest(
            token=self._token,
            done=self._behind + self.done,
            seen=seen + int(self._beyond.sum()),
            step=max(min(-(-all_there // _STEPS), missing), 1),
            wait_ms=int(wait_seconds * 1000),
            known=self.known,
        )

    def is_news(self, reply: pb.FollowResponse) -> bool:
        """Whether the reply says more than what is here. What it says of blocks without a slot is cut off.
        Raises InvalidRequestError for one that makes no sense."""
        layers, known = list(reply.layers), np.concatenate((self._layers[self.done :], self._beyond))
        whole, rest = divmod(len(reply.digests), DIGEST_BYTES)
        if (
            len(layers) > len(known)
            or rest
            or whole > len(layers)
            or any(each > self._order.sealed for each in layers)
            or any(each < self._order.sealed for each in layers[:whole])
        ):
            raise InvalidRequestError(
                f"follow: {len(layers)} blocks with layers {layers[:4]}, {len(reply.digests)} bytes of "
                f"digests; {len(known)} blocks of {self._order.sealed - 1} layers followed"
            )
        self._cut(reply)
        return bool(
            reply.digests or any(new > old for new, old in zip(reply.layers, known.tolist(), strict=False))
        )

    async def read(self, reply: pb.FollowResponse, most_bytes: int, seconds: float) -> int:
        """Brings what the reply says is there. Returns how many blocks, from the first that is not over on,
        have a digest there. most_bytes, seconds: of one read. Raises as PeerLinks.read()."""
        parts = []
        layers = self._layers.copy()
        for i, new in enumerate(reply.layers, self.done):
            layers[i] = max(new, layers[i])
            for offset, size in self._order.between(int(self._layers[i]), int(layers[i])).tolist():
                parts.append((self._first + i, offset, size, int(self._places[i]) + offset))
                self.early += size if layers[i] < self._order.sealed else 0
        table = np.array(parts, np.uint64).reshape(-1, 4)
        batch = np.cumsum(table[:, 2]) // np.uint64(most_bytes)
        for each in np.unique(batch):
            ranges = table[batch == each]
            await self._links.read(
                self.source, self._description, self._token, ranges[:, :3], ranges[:, 3], seconds
            )
        self._layers = layers
        await self._hash(int(table[:, 2].sum()))
        return len(reply.digests) // DIGEST_BYTES

    def sound(self, digests: bytes) -> int:
        """How many of the blocks that these are of, from the first that is not over on, are as they should
        be."""
        wanted = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        for i, digest in enumerate(wanted):
            if self._hashes[self.done + i].digest() != digest:
                return i
        return len(wanted)

    def over(self, count: int) -> Grant:
        """The next `count` blocks are over: their slots."""
        grant = self._grant_of(self.done, self.done + count)
        self.done += count
        return grant

    def _cut(self, reply: pb.FollowResponse) -> None:
        beyond = np.array(reply.layers[self.left :], np.int64)
        np.maximum(self._beyond[: len(beyond)], beyond, out=self._beyond[: len(beyond)])
        del reply.layers[self.left :]
        reply.digests = reply.digests[: self.left * DIGEST_BYTES]

    def _grant_of(self, first: int, last: int) -> Grant:
        return Grant(self._grant.slots[first:last], self._grant.generations[first:last])

    async def _hash(self, size: int) -> None:
        blocks = range(self.done, len(self._grant))
        if size <= SHORT_BYTES:
            self._hash_blocks(blocks)
        else:
            parts = [partial(self._hash_blocks, blocks[i::_HASHING]) for i in range(_HASHING)]
            await asyncio.gather(*(in_thread(self._plane.hashers, part) for part in parts))

    def _hash_blocks(self, blocks: Sequence[int]) -> None:
        for i in blocks:
            there = self._order.prefix(int(self._layers[i]))
            if there > self._hashed[i]:
                at = int(self._places[i]) + self._hashed[i]
                self._plane.hash_more(self._hashes[i], at, there - self._hashed[i])
                self._hashed[i] = there


class Promises:
    """The Followings of a store, and how many slots their sources may have blocks on their way in: what one
    of them promises and does not deliver keeps so much from others."""

    PART = 8
    """Of a pool's room, for one source."""

    def __init__(self) -> None:
        self._followed: set[Following] = set()

    def begin(self, following: Following) -> None:
        self._followed.add(following)

    def end(self, following: Following) -> None:
        self._followed.discard(following)

    def room(self, source: str, pool_id: bytes, slots: int) -> int:
        """Slots that blocks of one source may have now, more than they have. slots: of the pool, all."""
        mine = (each for each in self._followed if (each.source, each.pool_id) == (source, pool_id))
        return max(max(slots // self.PART, 1) - sum(len(each.rest) for each in mine), 0)
