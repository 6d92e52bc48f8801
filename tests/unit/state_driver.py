"""Short ways to drive a StoreState in tests: a tiny arena, numbered keys, engines with a clock."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from kvsieve_store.protocol.spec import Plane, PoolSpec
from kvsieve_store.state import Grant, Match, Released, Sealed, Session, StateSettings, StoreState

EXTENT_BYTES = 5 * 4096
"""Holds 4 slots of 4 KiB, or 2 of 8 KiB."""

ROOT = bytes(32)


def key(number: int | str) -> bytes:
    """A key that stands for a number."""
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers: int | str) -> bytes:
    return b"".join(key(number) for number in numbers)


def spec(name: str = "pool", slot_pages: int = 1, model: str = "model") -> PoolSpec:
    """A pool whose slots have `slot_pages` pages of 4 KiB."""
    planes = (Plane("main", (slot_pages * 4096,)),)
    return PoolSpec(name, model, "bfloat16", 16, "sha256", "", "LBHNC/cpu_attn", 1, planes)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def settings(extents: int = 4, **changes: object) -> StateSettings:
    """A small arena without watermarks, unless `changes` say otherwise."""
    values = {"extent_bytes": EXTENT_BYTES, "extents": extents, "free_low": 0.0, "free_high": 0.0}
    return StateSettings(**(values | changes))


@dataclass
class Engine:
    """One attached session, with a clock of its own."""

    state: StoreState
    session: Session
    first_grant: Grant
    now: float = 0.0
    grants: list[Grant] = field(default_factory=list)

    @property
    def id(self) -> bytes:
        return self.session.session_id

    def reserve(self, count: int) -> Grant:
        return self.state.reserve(self.id, count, self.now)

    def seal(
        self,
        grant: Grant,
        block_keys: bytes,
        parents: bytes | None = None,
        lease_ms: int = 0,
        lease_id: int = 0,
    ) -> Sealed:
        """Seals the first slots of a grant; no parents: each block is the first of its chain."""
        count = len(block_keys) // 32
        parents = bytes(len(block_keys)) if parents is None else parents
        slots, generations = grant.slots[:count], grant.generations[:count]
        return self.state.seal(self.id, block_keys, parents, slots, generations, self.now, lease_ms, lease_id)

    def save(self, *numbers: int | str) -> Grant:
        """Reserves and seals one block per number, none with a parent."""
        grant = self.reserve(len(numbers))
        self.seal(grant, keys(*numbers))
        return grant

    def save_chain(self, *numbers: int | str) -> Grant:
        """Reserves and seals one block per number, each the child of the one before."""
        grant = self.reserve(len(numbers))
        self.seal(grant, keys(*numbers), ROOT + keys(*numbers[:-1]))
        return grant

    def match(self, *numbers: int | str, lease_ms: int = 0) -> Match:
        return self.state.match(self.id, keys(*numbers), lease_ms, self.now)

    def release(self, *lease_ids: int, grant: Grant | None = None) -> Released:
        grant = Grant.none() if grant is None else grant
        return self.state.release(self.id, lease_ids, grant.slots, grant.generations, self.now)

    def leave(self) -> None:
        """Ends the session and fences it."""
        self.state.end_session(self.id, self.now)
        self.state.fenced(self.id)


def attach(
    state: StoreState,
    pool: PoolSpec | None = None,
    *,
    name: str = "engine",
    credits: int = 0,
    now: float = 0.0,
) -> Engine:
    """Attaches an engine; `name` makes the session id."""
    session, grant = state.attach(
        pool or spec(),
        engine_id=name,
        client="test",
        pid=1,
        credit_target=credits,
        session_id=hashlib.sha256(name.encode()).digest()[:16],
        now=now,
    )
    return Engine(state, session, grant, now)


def has(state: StoreState, number: int | str, pool: str = "pool") -> bool:
    """Whether a block is sealed, without touching its visited bit."""
    page = state.list_blocks(pool, 1000, "")
    return key(number) in {block.key for block in page.blocks}


def freeze(value: object, seen: dict[int, int] | None = None) -> object:
    """All that an object graph holds, as nested tuples that compare by value."""
    seen = {} if seen is None else seen
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, memoryview) or callable(value):
        return None
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, np.generic | np.ndarray):
        return (str(value.dtype), value.tobytes())
    if isinstance(value, dict):
        return tuple((freeze(k, seen), freeze(v, seen)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(freeze(each, seen) for each in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    names = getattr(type(value), "__slots__", None) or vars(value)
    return tuple((name, freeze(getattr(value, name), seen)) for name in names)
