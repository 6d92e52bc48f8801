"""What the state machine answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsieve_store.state.arrays import U8Array, U32Array


@dataclass(frozen=True)
class Grant:
    """Free slots, granted to a session. slots, generations: [n] uint32."""

    slots: U32Array
    generations: U32Array

    def __len__(self) -> int:
        return len(self.slots)

    @staticmethod
    def none() -> Grant:
        return Grant(np.zeros(0, np.uint32), np.zeros(0, np.uint32))


@dataclass(frozen=True)
class Match:
    """The longest sealed prefix. slots, generations: [matched] uint32; lease_id 0: nothing leased."""

    slots: U32Array
    generations: U32Array
    lease_id: int


@dataclass(frozen=True)
class Sealed:
    """status: [n] uint8, 1 sealed, 2 duplicate (proto SealStatus); grant: the session's top-up; lease_id 0:
    nothing leased."""

    status: U8Array
    grant: Grant
    lease_id: int


@dataclass(frozen=True)
class Released:
    """Leases that were still there, and slots that are free again."""

    leases: int
    slots: int


@dataclass(frozen=True)
class Evicted:
    """Blocks dropped, keys (or blocks of the count asked) that had to stay, and keys that are unknown."""

    evicted: int
    skipped: int
    unknown: int


@dataclass(frozen=True)
class Pinned:
    """Named blocks that are pinned now, and keys that the pool does not have."""

    pinned: int
    unknown: int


@dataclass(frozen=True)
class Unpinned:
    """Blocks that lost their pin, and keys that the pool does not have."""

    unpinned: int
    unknown: int


@dataclass(frozen=True)
class Cleared:
    """Blocks dropped, and leased blocks, which stay."""

    dropped: int
    skipped: int


@dataclass
class Counters:
    """What happened in a pool since it was made. Each only grows.

    matched_blocks: keys that a match found. missed_blocks: keys asked beyond what matched.
    sealed_blocks, duplicate_blocks: outcomes of seals. evicted_blocks: dropped to make room, or by an
    operator's evict. cleared_blocks: dropped by an operator's clear. granted_slots: credits and reservations.
    denied_slots: reserved beyond what could be granted. expired_leases: leases that ran out.
    """

    matched_blocks: int = 0
    missed_blocks: int = 0
    sealed_blocks: int = 0
    duplicate_blocks: int = 0
    evicted_blocks: int = 0
    cleared_blocks: int = 0
    granted_slots: int = 0
    denied_slots: int = 0
    expired_leases: int = 0


@dataclass(frozen=True)
class Totals:
    """The whole store, now. Bytes: of the arena, owned by pools, in slots of sealed blocks."""

    arena_bytes: int
    owned_bytes: int
    sealed_bytes: int
    pools: int
    sessions: int
    fencing_sessions: int
    sealed_blocks: int
    leases: int
    held_blocks: int


@dataclass(frozen=True)
class SessionRow:
    """One session, as admin.proto SessionInfo."""

    session: str
    engine_id: str
    client: str
    pid: int
    pool: str
    age_seconds: float
    idle_seconds: float
    held_slots: int
    leases: int
    state: str


@dataclass(frozen=True)
class PoolRow:
    """One pool, as admin.proto PoolInfo."""

    pool_id: str
    name: str
    model: str
    dtype: str
    block_tokens: int
    hash_algo: str
    layout: str
    tp_size: int
    slot_bytes: int
    owned_bytes: int
    quota_bytes: int
    free_slots: int
    writing_slots: int
    sealed_blocks: int
    leased_blocks: int
    pinned_blocks: int
    sessions: int
    matched_blocks: int
    evicted_blocks: int


@dataclass(frozen=True)
class BlockRow:
    """One sealed block, as admin.proto BlockInfo."""

    key: bytes
    parent: bytes
    slot: int
    generation: int
    leases: int
    pinned: bool
    visited: bool
    children: int


@dataclass(frozen=True)
class BlockPage:
    """A page of blocks. next_page_token: empty on the last."""

    blocks: list[BlockRow]
    next_page_token: str
