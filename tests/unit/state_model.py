"""A model of StoreState made of dicts, and how it accounts for blocks that went.

It knows what must be there. It does not predict which cold blocks are evicted, but holds every disappearance
to the rules, and every refusal to grant to the want of anything that could go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from kvsieve_store.errors import KVSieveError
from kvsieve_store.state import Grant, StateSettings, StoreState
from kvsieve_store.state.pool import Pool
from tests.unit.state_driver import EXTENT_BYTES, freeze, key, spec

EXTENTS = 5
MAX_SESSIONS = 4
TIMEOUT = 10.0
POOLS = {"a": spec("a"), "b": spec("b", slot_pages=2), "c": spec("c")}
QUOTAS = {"a": EXTENTS, "b": 4, "c": 2}
KEYS = [key(number) for number in range(14)]


@dataclass
class Block:
    slot: int
    generation: int
    parent: bytes
    pinned: bool = False


@dataclass
class SessionModel:
    pool: str
    credit_target: int
    last_seen: float
    held: dict[int, int] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    ended: bool = False


@dataclass
class LeaseModel:
    """slots: of the pool, that were being written when they were leased, and were not sealed since."""

    session: bytes
    keys: set[bytes]
    duration: float
    expiry: float
    slots: set[int] = field(default_factory=set)


class Told:
    """What somebody knows who hears of every change and of nothing else."""

    def __init__(self) -> None:
        self.keys: set[tuple[bytes, bytes]] = set()

    def sealed(self, family_id: bytes, keys: bytes) -> None:
        new = self._each(family_id, keys)
        assert new.isdisjoint(self.keys)
        self.keys |= new

    def dropped(self, family_id: bytes, keys: bytes) -> None:
        gone = self._each(family_id, keys)
        assert gone <= self.keys
        self.keys -= gone

    def _each(self, family_id: bytes, keys: bytes) -> set[tuple[bytes, bytes]]:
        found = {(family_id, keys[i : i + 32]) for i in range(0, len(keys), 32)}
        assert len(found) * 32 == len(keys) > 0
        return found


class StoreModel(RuleBasedStateMachine):
    """A StoreState and the model of it; rules and invariants are added by subclasses."""

    def start(self, low: float) -> None:
        """low: the low watermark; the high one is twice that."""
        self.now = 0.0
        self.low = low
        self.told = Told()
        self.state = StoreState(
            StateSettings(
                extent_bytes=EXTENT_BYTES,
                extents=EXTENTS,
                quotas={name: quota * EXTENT_BYTES for name, quota in QUOTAS.items()},
                session_timeout=TIMEOUT,
                max_sessions=MAX_SESSIONS,
                free_low=low,
                free_high=2 * low,
            ),
            self.told,
        )
        self.attached = 0
        self.blocks: dict[str, dict[bytes, Block]] = {}
        self.sessions: dict[bytes, SessionModel] = {}
        self.leases: dict[int, LeaseModel] = {}
        self.extents: dict[str, set[int]] = {}
        self.generations: dict[tuple[str, int], int] = {}
        self.announced: dict[str, dict[bytes, int]] = {}
        """Per pool, the slot that is being written under each key."""
        self.to_hold: dict[str, dict[bytes, float]] = {}
        """Per pool, for how long announced keys are to be held; only those that are."""
        self.handoffs: dict[str, dict[bytes, tuple[bytes, float]]] = {}
        """Per pool, who has announced a block that is held, and until when."""
        self.leaving: dict[str, set[int]] = {}
        """Per pool, slots that were given back while they were leased."""

    # What the model knows

    def live(self) -> list[bytes]:
        return [session_id for session_id, session in self.sessions.items() if not session.ended]

    def pool(self, name: str) -> Pool:
        return self.state._pools[name]

    def slots_of(self, name: str, extent: int) -> range:
        per_extent = self.pool(name).layout.slots_per_extent
        return range(extent * per_extent, (extent + 1) * per_extent)

    def leased(self, name: str) -> set[bytes]:
        leases = self.leases.values()
        leased = {k for lease in leases if self.sessions[lease.session].pool == name for k in lease.keys}
        return leased | self.handoffs[name].keys()

    def leased_slots(self, name: str) -> set[int]:
        """Being written, or given back since."""
        leases = self.leases.values()
        return {s for lease in leases if self.sessions[lease.session].pool == name for s in lease.slots}

    def gave_back(self, name: str, slots: set[int]) -> None:
        """Books slots that a session has no more, unsealed."""
        self.announced[name] = {k: s for k, s in self.announced[name].items() if s not in slots}
        self.leaving[name] |= slots & self.leased_slots(name)

    def unleased(self) -> None:
        """Books that leases have gone."""
        for name in self.leaving:
            self.leaving[name] &= self.leased_slots(name)

    def held_keys(self, name: str) -> set[bytes]:
        """Leased or pinned."""
        return self.leased(name) | {k for k, block in self.blocks[name].items() if block.pinned}

    def children(self, name: str, parent: bytes) -> set[bytes]:
        return {k for k, block in self.blocks[name].items() if block.parent == parent}

    def subtree(self, name: str, root: bytes) -> set[bytes]:
        return {root}.union(*(self.subtree(name, child) for child in self.children(name, root)))

    def evictable(self, name: str) -> set[bytes]:
        free = self.blocks[name].keys() - self.held_keys(name)
        return {k for k in free if not self.children(name, k)}

    def fenced_off(self, name: str, extent: int) -> bool:
        """Whether something in the extent must stay where it is."""
        slots = self.slots_of(name, extent)
        held = {slot for s in self.sessions.values() if s.pool == name for slot in s.held}
        writing = any(slot in slots for slot in held | self.leaving[name])
        staying = self.leased(name)
        for k, block in self.blocks[name].items():
            while block.pinned and k:
                staying.add(k)
                k = self.blocks[name][k].parent
        return writing or any(self.blocks[name][k].slot in slots for k in staying)

    def could_take_extent(self, name: str) -> bool:
        if len(self.extents[name]) >= QUOTAS[name]:
            return False
        if sum(map(len, self.extents.values())) < EXTENTS:
            return True
        used = {s.pool for s in self.sessions.values() if not s.ended} | {name}
        return any(
            not self.fenced_off(other, extent)
            for other, extents in self.extents.items()
            if other != name and (other not in used or len(extents) > EXTENTS / len(used))
            for extent in extents
        )

    # Accounting for what an operation did

    def refuses(self, kind: type[KVSieveError], call: Callable[[], object]) -> None:
        before = freeze(self.state)
        with pytest.raises(kind):
            call()
        assert freeze(self.state) == before

    def took(self, session_id: bytes, grant: Grant, at_most: int) -> None:
        """Books a grant; fewer slots than asked must mean that nothing more could be had."""
        session = self.sessions[session_id]
        assert len(grant) <= max(0, at_most)
        for slot, generation in zip(grant.slots.tolist(), grant.generations.tolist(), strict=True):
            assert all(slot not in s.held for s in self.sessions.values() if s.pool == session.pool)
            assert slot not in self.leased_slots(session.pool)
            session.held[slot] = generation
        self.settle(evictions=True)
        if len(grant) < at_most:
            assert self.pool(session.pool).free == 0
            assert not self.evictable(session.pool)
            assert not self.could_take_extent(session.pool)

    def settle(self, evictions: bool = False) -> None:
        """Takes over which blocks and extents went; without `evictions` none may have."""
        for name in [name for name in self.blocks if name not in self.state._pools]:
            assert evictions or not self.blocks[name]
            assert all(session.pool != name for session in self.sessions.values())
            assert not self.leaving[name]
            assert not self.handoffs[name]
            del self.blocks[name], self.extents[name], self.announced[name], self.leaving[name]
            del self.to_hold[name], self.handoffs[name]
        for name, blocks in self.blocks.items():
            pool = self.pool(name)
            there = {row.key for row in self.state.list_blocks(name, 1000, "").blocks}
            gone = {k: blocks[k] for k in blocks.keys() - there}
            lost_extents = self.extents[name] - set(pool.extents)
            assert evictions or not gone
            assert not gone.keys() & self.held_keys(name)
            for k in gone:
                del blocks[k]
            for block in blocks.values():
                if block.parent in gone:
                    # A parent goes before its child only with its whole extent.
                    assert gone[block.parent].slot // pool.layout.slots_per_extent in lost_extents
                    block.parent = b""
            self.extents[name] = set(pool.extents)
