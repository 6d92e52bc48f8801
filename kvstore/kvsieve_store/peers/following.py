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

    done: of the blocks, from the first on, those that are over. early: bytes read before their block was
    known to be sealed.
    """

    def __init__(
        self,
        links: PeerLinks,
        plane: DataPlane,
        order: LayerOrder,
        source: str,
        offer: tuple[Description, bytes],
        first: int,
        behind: int,
        grant: Grant,
        places: U64Array,
    ) -> None:
        """offer: its description and token. first: place of the first block in it; behind: the same among the
        coming ones. grant: a slot for each block; places: of these, in the memory."""
        self._links, self._plane, self._order = links, plane, order
        self._source = source
        self._description, self._token = offer
        self._first, self._behind = first, behind
        self._grant, self._places = grant, places
        self._layers = np.zeros(len(grant), np.int64)
        self._hashes = [blake3() for _ in range(len(grant))]
        self._hashed = [0] * len(grant)
        self.done = 0
        self.early = 0

    @property
    def rest(self) -> Grant:
        """Slots of the blocks that are not over."""
        return self._grant_of(self.done, len(self._grant))

    def request(self, wait_seconds: float) -> pb.FollowRequest:
        layers = self._layers[self.done :]
        seen, all_there = int(layers.sum()), len(layers) * (self._order.sealed - 1)
        return pb.FollowRequest(
            token=self._token,
            done=self._behind + self.done,
            seen=seen,
            step=max(min(-(-all_there // _STEPS), all_there - seen), 1),
            wait_ms=int(wait_seconds * 1000),
            known=len(layers),
        )

    def is_news(self, reply: pb.FollowResponse) -> bool:
        """Whether the reply says more than what is here. Raises InvalidRequestError for one that makes no
        sense."""
        layers, known = list(reply.layers), self._layers[self.done :]
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
        return bool(whole or any(new > old for new, old in zip(layers, known.tolist(), strict=False)))

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
                self._source, self._description, self._token, ranges[:, :3], ranges[:, 3], seconds
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
