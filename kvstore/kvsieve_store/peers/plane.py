"""DataPlane: a store's end of all transports."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from blake3 import blake3

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.arena import Arena
from kvsieve_store.errors import SettingsError, UnavailableError
from kvsieve_store.settings import StoreSettings
from kvsieve_store.transport.description import Description, Segment, Ucx
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.shm import boot_id
from kvsieve_store.transport.tcp import TcpListener
from kvsieve_store.transport.ucx.engine import Engine
from kvsieve_store.transport.ucx.listener import UcxListener

_log = logging.getLogger(__name__)

DIGEST_BYTES = 32

SHORT_BYTES = 512 << 10
"""Up to so many are hashed in the event loop, in less than 0.3 ms: to wake a thread takes longer."""

_THREADS = 64
"""Each waits for one peer: those that hang, until they are given up, must not keep others waiting."""

_HASHERS = 4

MAX_OFFERS = 256
"""At a time; each takes a session of the store's."""


class DataPlane:
    """Serves exports of the arena where `peer_listen` says, and reads other stores' into it.

    memory: the arena; offsets are those of protocol.layout. exports: what peers may read. engine: UCX, None
    without. threads: for calls that wait for a peer. hashers: for digests. description: what peers need to
    connect; None when no peers are served.
    """

    def __init__(self, settings: StoreSettings, arena: Arena) -> None:
        """Blocks: registers the arena with UCX. Raises SettingsError."""
        self._exits = ExitStack()
        self.memory = Memory([segment.view for segment in arena.segments])
        self._exits.callback(self.memory.close)
        self.exports = Exports(self.memory, MAX_OFFERS)
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvsieve-peers")
        self._exits.callback(self.threads.shutdown)
        self.hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="kvsieve-hashers")
        self._exits.callback(self.hashers.shutdown)
        self._listeners: list[TcpListener | UcxListener] = []
        self.transports = settings.transports
        self.engine = self._start_engine(settings)
        self.description: Description | None = None
        try:
            if settings.peer_address is not None:
                self.description = self._serve(settings.peer_address, arena)
        except BaseException:
            self.close()
            raise

    @property
    def links(self) -> int:
        """Peers' connections now."""
        return sum(listener.links for listener in self._listeners)

    def hash_more(self, hasher: blake3, offset: int, size: int) -> blake3:
        """Adds bytes of the memory to a hash."""
        (view,) = self.memory.slices(np.array([offset], np.uint64), np.array([size], np.uint64))
        return hasher.update(view)

    def digest(self, offset: int, at: U64Array, lengths: U64Array) -> bytes:
        """BLAKE3 of the pieces of a slot at `offset` of the memory, end to end, 32 bytes.

        at, lengths: [n] uint64, of each piece: offset in the slot, and bytes.
        """
        views = self.memory.slices(at + np.uint64(offset), lengths)
        return blake3(views[0] if len(views) == 1 else b"".join(views)).digest()

    def digests(self, offsets: U64Array, at: U64Array, lengths: U64Array) -> bytes:
        """digest() of each slot, end to end. Blocks."""
        return b"".join(self.digest(offset, at, lengths) for offset in offsets.tolist())

    def close(self) -> None:
        """Ends all connections; blocks until nobody touches the arena any more."""
        self._exits.close()

    def _start_engine(self, settings: StoreSettings) -> Engine | None:
        """UCX opens ports of its own as soon as it is started: only where peers are served at all, and then
        on the same side of the machine."""
        address = settings.peer_address
        if "ucx" not in self.transports or address is None:
            return None
        try:
            engine = Engine(settings.ucx_tls, {"NET_DEVICES": "lo"} if address.is_loopback else None)
        except UnavailableError as error:
            _log.info("%s", error)
            return None
        self._exits.callback(engine.close)
        return engine

    def _serve(self, address: TcpAddress, arena: Arena) -> Description:
        try:
            tcp = TcpListener(self.exports, address)
        except OSError as error:
            raise SettingsError(
                f"peer_listen: can't listen on {address.host_port}: {error.strerror}"
            ) from None
        self._exits.callback(tcp.close)
        self._listeners.append(tcp)
        ucx: Ucx | None = None
        if self.engine is not None:
            listener = UcxListener(self.engine, self.exports)
            self._exits.callback(listener.close)
            self._listeners.append(listener)
            ucx = listener.description
        return Description(tcp=tcp.address.host_port, host=boot_id(), segments=_segments(arena), ucx=ucx)


def _segments(arena: Arena) -> tuple[Segment, ...]:
    found = []
    for segment in arena.segments:
        there = os.stat(segment.path)
        found.append(
            Segment(path=str(segment.path), size=segment.size, device=there.st_dev, inode=there.st_ino)
        )
    return tuple(found)
