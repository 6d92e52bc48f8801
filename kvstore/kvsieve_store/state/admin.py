"""What an operator may do to a pool, and the rows that listings show."""

from __future__ import annotations

import numpy as np

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.state.arrays import KeyArray, SlotArray
from kvsieve_store.state.pool import Pool
from kvsieve_store.state.protection import mark_with_ancestors
from kvsieve_store.state.results import (
    BlockPage,
    BlockRow,
    Cleared,
    Evicted,
    Pinned,
    PoolRow,
    SessionRow,
    Unpinned,
)
from kvsieve_store.state.sessions import Session
from kvsieve_store.state.slots import SEALED

MAX_PAGE = 1000
DEFAULT_PAGE = 100


def evict_keys(pool: Pool, keys: KeyArray) -> Evicted:
    """Drops named blocks with all their descendants, unless one of those is leased or pinned."""
    named, unknown = _look_up(pool, keys)
    table = pool.table
    blocks = pool.sieve.slots()
    busy = pool.protection.marked().copy()
    mark_with_ancestors(table.parent, blocks[table.leases[blocks] > 0], busy)
    going = named[~busy[named]]
    doomed = _with_descendants(pool, blocks, going)
    pool.drop(doomed)
    pool.counters.evicted_blocks += len(doomed)
    return Evicted(len(doomed), len(named) - len(going), unknown)


def evict_coldest(pool: Pool, count: int) -> Evicted:
    """Drops the `count` blocks that eviction would take next, or as many as can go."""
    wanted = min(count, pool.sealed)
    evicted = pool.evict(wanted)
    return Evicted(evicted, wanted - evicted, 0)


def pin(pool: Pool, keys: KeyArray) -> Pinned:
    named, unknown = _look_up(pool, keys)
    pool.protection.pin(named)
    return Pinned(len(named), unknown)


def unpin(pool: Pool, keys: KeyArray) -> Unpinned:
    """Takes pins away; no keys: every pin of the pool."""
    named, unknown = _look_up(pool, keys) if len(keys) else (pool.sieve.slots(), 0)
    pinned = named[pool.table.pinned[named] > 0]
    pool.unpin(pinned)
    return Unpinned(len(pinned), unknown)


def clear(pool: Pool) -> Cleared:
    """Drops every block that is not leased; pins do not protect."""
    blocks = pool.sieve.slots()
    going = blocks[pool.table.leases[blocks] == 0]
    pool.drop(going)
    pool.counters.cleared_blocks += len(going)
    return Cleared(len(going), len(blocks) - len(going))


def session_row(session: Session, now: float) -> SessionRow:
    return SessionRow(
        session=session.session_id[:4].hex(),
        engine_id=session.engine_id,
        client=session.client,
        pid=session.pid,
        pool=session.pool.spec.name,
        age_seconds=now - session.attached_at,
        idle_seconds=now - session.last_seen,
        held_slots=session.held,
        leases=len(session.leases),
        state=session.state,
    )


def pool_row(pool: Pool) -> PoolRow:
    spec, extent_bytes = pool.spec, pool.layout.extent_bytes
    blocks = pool.sieve.slots()
    return PoolRow(
        pool_id=pool.pool_id.hex(),
        name=spec.name,
        model=spec.model,
        dtype=spec.dtype,
        block_tokens=spec.block_tokens,
        hash_algo=spec.hash_algo,
        layout=spec.layout,
        tp_size=spec.tp_size,
        slot_bytes=pool.layout.slot_bytes,
        owned_bytes=len(pool.extents) * extent_bytes,
        quota_bytes=pool.quota * extent_bytes,
        free_slots=pool.free,
        writing_slots=pool.writing,
        sealed_blocks=pool.sealed,
        leased_blocks=int(np.count_nonzero(pool.table.leases[blocks])),
        pinned_blocks=int(np.count_nonzero(pool.table.pinned[blocks])),
        sessions=pool.attached,
        matched_blocks=pool.counters.matched_blocks,
        evicted_blocks=pool.counters.evicted_blocks,
    )


def block_page(pool: Pool, page_size: int, page_token: str) -> BlockPage:
    """Blocks by slot number, from the one that `page_token` names on; page_size 0: 100."""
    if not 0 <= page_size <= MAX_PAGE:
        raise InvalidRequestError(f"page_size: {page_size} given, 0 to {MAX_PAGE} allowed")
    if page_token and not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 10):
        raise InvalidRequestError("page_token: not one that an earlier page gave")
    size = page_size or DEFAULT_PAGE
    start = int(page_token or "0")
    found: list[int] = []
    for extent in sorted(pool.extents):
        part = pool.extent_slots(extent)
        first = max(part.start, start)
        if first >= part.stop:
            continue
        found += (np.flatnonzero(pool.table.state[first : part.stop] == SEALED) + first).tolist()
        if len(found) > size:
            break
    token = str(found[size]) if len(found) > size else ""
    return BlockPage([_block_row(pool, slot) for slot in found[:size]], token)


def _block_row(pool: Pool, slot: int) -> BlockRow:
    table = pool.table
    parent = int(table.parent[slot])
    return BlockRow(
        key=table.key[slot].tobytes(),
        parent=table.key[parent - 1].tobytes() if parent else b"",
        slot=slot,
        generation=int(table.generation[slot]),
        leases=int(table.leases[slot]),
        pinned=bool(table.pinned[slot]),
        visited=bool(table.visited[slot]),
        children=int(table.children[slot]),
    )


def _look_up(pool: Pool, keys: KeyArray) -> tuple[SlotArray, int]:
    """Slots of the known keys, each once, and how many keys are unknown."""
    slots = pool.index.find(keys)
    known = slots >= 0
    return np.unique(slots[known]), int(np.count_nonzero(~known))


def _with_descendants(pool: Pool, blocks: SlotArray, roots: SlotArray) -> SlotArray:
    """`roots` and all blocks after them in their chains. blocks: all of the pool, oldest first.

    Pointer jumping: each round doubles how far up the chain a block has looked, so the rounds number the
    logarithm of the longest chain.
    """
    if not len(roots):
        return roots
    table = pool.table
    marked = np.zeros(len(table), np.bool_)
    marked[roots] = True
    rank = np.zeros(len(table), np.int32)
    rank[blocks] = np.arange(len(blocks))
    above = np.where(table.parent[blocks] > 0, rank[table.parent[blocks] - 1], np.arange(len(blocks)))
    reached = marked[blocks]
    while True:
        reached = reached | reached[above]
        further = above[above]
        if np.array_equal(further, above):
            doomed: SlotArray = blocks[reached]
            return doomed
        above = further
