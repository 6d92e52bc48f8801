"""Peers: all that a store has to do with other stores."""

from __future__ import annotations

import asyncio

from kvsieve_store.peers.fetch import Fetcher
from kvsieve_store.peers.holds import Holds
from kvsieve_store.peers.links import PeerLinks
from kvsieve_store.peers.offers import Offers
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.peers.puller import Puller
from kvsieve_store.server.core import Core


class Peers:
    """Runs in the event loop's thread; made once the store is ready."""

    def __init__(self, core: Core, plane: DataPlane) -> None:
        self.plane = plane
        self.links = PeerLinks(plane)
        self.holds = Holds(core)
        self.offers = Offers(core, plane, self.holds)
        self.puller = Puller(core, plane, self.links)
        self.fetcher = Fetcher(core, self.puller, core.directory) if core.directory else None
        self._closing_idle: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Once a second. What waits for peers' threads does so behind it, one at a time."""
        self.offers.tick()
        self.holds.tick()
        self.puller.tick()
        if self._closing_idle is None or self._closing_idle.done():
            self._closing_idle = asyncio.create_task(self.links.close_idle())

    async def close(self) -> None:
        """Returns once nobody touches the arena any more."""
        await self.puller.close()
        if self._closing_idle is not None:
            self._closing_idle.cancel()
            await asyncio.wait([self._closing_idle])
        await self.links.close()
        self.plane.close()
