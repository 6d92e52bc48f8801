"""The store's shared memory: segments, headers and the lock files that say who may touch what."""

from kvsieve_store.arena.arena import Arena
from kvsieve_store.arena.locks import SessionLock, SocketLock

__all__ = ["Arena", "SessionLock", "SocketLock"]
