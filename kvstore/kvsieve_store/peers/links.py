"""Links to other stores: one each, whose readers take turns, and what was counted of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from kvsieve_store.errors import KVSieveError, LinkError
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.peers.threads import in_thread
from kvsieve_store.transport.base import Link
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import U64Array

IDLE_SECONDS = 60.0

MAX_PEERS = 256
"""Beyond so many, those without a link are forgotten, and their counters with them."""


@dataclass
class PeerCounters:
    """Of one store that was pulled from. Each only grows.

    bytes, seconds: read, by transport; the time of a read includes no wait for its turn. early: of the bytes,
    those of blocks that were still being written. failures: of links.
    pulled, damaged: blocks.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    early: int = 0
    failures: int = 0
    pulled: int = 0
    damaged: int = 0


@dataclass(eq=False)
class _Peer:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    link: Link | None = None
    description: Description | None = None
    used: float = 0.0
    counters: PeerCounters = field(default_factory=PeerCounters)


class PeerLinks:
    """Runs in the event loop's thread; reads block threads of the data plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._peers: dict[str, _Peer] = {}

    def counters(self) -> dict[str, PeerCounters]:
        """By the peer's control address."""
        return {source: peer.counters for source, peer in self._peers.items()}

    def counters_of(self, source: str) -> PeerCounters:
        """Of one peer, to be counted in."""
        return self._peers.setdefault(source, _Peer()).counters

    def open_links(self) -> Counter[str]:
        """Links now, by transport."""
        return Counter(peer.link.transport for peer in self._peers.values() if peer.link is not None)

    async def read(
        self,
        source: str,
        description: Description,
        token: bytes,
        ranges: U64Array,
        into: U64Array,
        seconds: float,
    ) -> None:
        """Link.read() of a peer, when its turn has come: first come, first served, so that pulls that read in
        batches share a link by equal parts.

        seconds: for the read, once it is its turn. Raises as Link.read(). Once it has returned, raised or
        been cancelled, nothing is written to the memory any more.
        """
        peer = self._peers.setdefault(source, _Peer())
        async with peer.turn:
            try:
                await self._read(peer, description, token, ranges, into, time.monotonic() + seconds)
            except BaseException as error:
                is_broken = isinstance(error, LinkError)
                peer.counters.failures += is_broken
                if is_broken or not isinstance(error, KVSieveError):
                    await self._drop(peer)
                raise

    async def _read(
        self,
        peer: _Peer,
        description: Description,
        token: bytes,
        ranges: U64Array,
        into: U64Array,
        deadline: float,
    ) -> None:
        if peer.description != description:
            await self._drop(peer)
        if peer.link is None:
            await in_thread(self._plane.threads, partial(self._connect, peer, description, token, deadline))
        assert peer.link is not None
        link, started = peer.link, time.monotonic()
        await in_thread(self._plane.threads, partial(link.read, token, ranges, into, deadline), link.close)
        peer.used = time.monotonic()
        counters, name = peer.counters, link.transport
        counters.bytes[name] += int(ranges[:, 2].sum())
        counters.seconds[name] = counters.seconds.get(name, 0.0) + peer.used - started

    def _connect(self, peer: _Peer, description: Description, token: bytes, deadline: float) -> None:
        """In a thread: who is cancelled meanwhile finds the link, and drops it."""
        plane = self._plane
        peer.link = connect(
            description, token, plane.memory, deadline, engine=plane.engine, transports=plane.transports
        )
        peer.description = description

    async def close_idle(self) -> None:
        """Ends links that nobody has used for a minute, and forgets peers when there are too many."""
        for peer in list(self._peers.values()):
            if (
                peer.link is not None
                and not peer.turn.locked()
                and peer.used + IDLE_SECONDS < time.monotonic()
            ):
                async with peer.turn:
                    await self._drop(peer)
        if len(self._peers) > MAX_PEERS:
            self._peers = {
                source: peer
                for source, peer in self._peers.items()
                if peer.link is not None or peer.turn.locked()
            }

    async def close(self) -> None:
        for peer in self._peers.values():
            await self._drop(peer)

    async def _drop(self, peer: _Peer) -> None:
        link, peer.link, peer.description = peer.link, None, None
        if link is not None:
            await in_thread(self._plane.threads, link.close)
