"""Links to other stores: one each, whose readers take turns, and what was counted of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvsieve_store.errors import KVSieveError, LinkError
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.transport.base import Link
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import U64Array

T = TypeVar("T")

IDLE_SECONDS = 60.0


@dataclass
class PeerCounters:
    """Of one store that was pulled from. Each only grows.

    bytes, seconds: read, by transport; the time of a read includes no wait for its turn. failures: of links.
    pulled, damaged: blocks.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
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
            except (LinkError, asyncio.CancelledError) as error:
                peer.counters.failures += isinstance(error, LinkError)
                await asyncio.shield(self._drop(peer))
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
            plane = self._plane
            peer.link = await self._run(
                partial(
                    connect,
                    description,
                    token,
                    plane.memory,
                    deadline,
                    engine=plane.engine,
                    transports=plane.transports,
                )
            )
            peer.description = description
        link, started = peer.link, time.monotonic()
        await self._run(partial(link.read, token, ranges, into, deadline), link.close)
        peer.used = time.monotonic()
        counters, name = peer.counters, link.transport
        counters.bytes[name] += int(ranges[:, 2].sum())
        counters.seconds[name] = counters.seconds.get(name, 0.0) + peer.used - started

    async def close_idle(self) -> None:
        """Ends links that nobody has used for a minute."""
        for peer in list(self._peers.values()):
            if (
                peer.link is not None
                and not peer.turn.locked()
                and peer.used + IDLE_SECONDS < time.monotonic()
            ):
                async with peer.turn:
                    await self._drop(peer)

    async def close(self) -> None:
        for peer in self._peers.values():
            await self._drop(peer)

    async def _drop(self, peer: _Peer) -> None:
        link, peer.link, peer.description = peer.link, None, None
        if link is not None:
            await self._run(link.close)

    async def _run(self, call: Callable[[], T], end: Callable[[], None] | None = None) -> T:
        """In a thread, and never left behind there: who is cancelled waits until the thread is done, which
        `end` makes soon."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._plane.threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if end is not None:
                await asyncio.shield(loop.run_in_executor(None, end))
            with suppress(KVSieveError):
                await asyncio.shield(future)
            raise
