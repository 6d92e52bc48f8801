"""What engines use: a session with the store of their host, its arena mapped, and the operator's calls."""

from kvsieve_store.client.admin import AdminClient
from kvsieve_store.client.arena_map import ArenaMap
from kvsieve_store.client.arena_memory import ArenaMemory
from kvsieve_store.client.async_client import AsyncStoreClient
from kvsieve_store.client.handles import (
    Attachment,
    ClientState,
    Fetch,
    Held,
    Match,
    Pulled,
    SealEntry,
    SealResult,
    SlotRef,
)
from kvsieve_store.client.remote import RemoteBlocks
from kvsieve_store.client.store_client import StoreClient

__all__ = [
    "AdminClient",
    "ArenaMap",
    "ArenaMemory",
    "AsyncStoreClient",
    "Attachment",
    "ClientState",
    "Fetch",
    "Held",
    "Match",
    "Pulled",
    "RemoteBlocks",
    "SealEntry",
    "SealResult",
    "SlotRef",
    "StoreClient",
]
