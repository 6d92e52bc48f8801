"""The store's pure state machine: no I/O, no clock. StoreState is its one entry point."""

from kvsieve_store.state.arrays import U8Array, U32Array
from kvsieve_store.state.changes import Changes
from kvsieve_store.state.results import (
    BlockPage,
    BlockRow,
    Cleared,
    Counters,
    Evicted,
    Grant,
    Match,
    Pinned,
    PoolRow,
    Released,
    Sealed,
    SessionRow,
    Totals,
    Unpinned,
)
from kvsieve_store.state.sessions import Session
from kvsieve_store.state.settings import StateSettings
from kvsieve_store.state.store import StoreState

__all__ = [
    "BlockPage",
    "BlockRow",
    "Changes",
    "Cleared",
    "Counters",
    "Evicted",
    "Grant",
    "Match",
    "Pinned",
    "PoolRow",
    "Released",
    "Sealed",
    "Session",
    "SessionRow",
    "StateSettings",
    "StoreState",
    "Totals",
    "U8Array",
    "U32Array",
    "Unpinned",
]
