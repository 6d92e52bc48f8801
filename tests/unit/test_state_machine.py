"""StoreState against a model made of dicts, through random histories."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PoolMismatchError,
    SlotNotHeldError,
)
from kvsieve_store.protocol.limits import MAX_LEASE_MS
from kvsieve_store.protocol.spec import PoolSpec
from tests.unit.state_driver import ROOT, spec
from tests.unit.state_model import (
    EXTENTS,
    KEYS,
    MAX_SESSIONS,
    POOLS,
    TIMEOUT,
    Block,
    LeaseModel,
    SessionModel,
)
from tests.unit.state_operators import OperatorRules, few_keys, names

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
lease_lengths = st.sampled_from([0, 500, 3000])
faults = st.sampled_from(["slot", "generation", "twice", "zero key", "short key", "length", "lease"])


class StoreMachine(OperatorRules):
    """Each rule drives both, compares the answers, and lets settle() account for blocks that went."""

    def draw_session(self, data: st.DataObject) -> bytes:
        return data.draw(st.sampled_from(self.live()))

    @initialize(low=st.sampled_from([0.0, 0.3]), credits=st.integers(0, 2))
    def begin(self, low: float, credits: int) -> None:
        self.start(low)
        for name in ("a", "b", "a"):
            self.attach_engine(name, credits, POOLS[name])

    def credits(self, session_id: bytes) -> int:
        """The target, within the session's part of a quarter of the pool's room."""
        session = self.sessions[session_id]
        pool = self.pool(session.pool)
        attached = sum(m.pool == session.pool and not m.ended for m in self.sessions.values())
        return min(session.credit_target, max(1, pool.quota * pool.layout.slots_per_extent // (4 * attached)))

    # Sessions

    @rule(name=names, credits=st.integers(0, 3), other_model=st.sampled_from([False] * 5 + [True]))
    def attach(self, name: str, credits: int, other_model: bool) -> None:
        wanted = spec(name, POOLS[name].planes[0].layer_bytes[0] // 4096, "other" if other_model else "model")
        self.attach_engine(name, credits, wanted)

    def attach_engine(self, name: str, credits: int, wanted: PoolSpec) -> None:
        self.attached += 1
        session_id = self.attached.to_bytes(16, "big")

        def call():
            return self.state.attach(
                wanted,
                engine_id="e",
                client="",
                pid=1,
                credit_target=credits,
                session_id=session_id,
                now=self.now,
            )

        there = self.state._pools.get(name)
        in_use = any(session.pool == name for session in self.sessions.values()) or self.blocks.get(name)
        if len(self.sessions) == MAX_SESSIONS:
            self.refuses(CapacityError, call)
        elif there is not None and there.spec != wanted and in_use:
            self.refuses(PoolMismatchError, call)
        else:
            session, grant = call()
            assert session.session_id == session_id
            self.blocks.setdefault(name, {})
            self.extents.setdefault(name, set())
            self.announced.setdefault(name, {})
            self.leaving.setdefault(name, set())
            self.to_hold.setdefault(name, {})
            self.handoffs.setdefault(name, {})
            self.sessions[session_id] = SessionModel(name, credits, self.now)
            self.took(session_id, grant, self.credits(session_id))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        session_id = self.draw_session(data)
        renewed = data.draw(st.sets(st.sampled_from([999, *self.leases])))
        self.state.heartbeat(session_id, sorted(renewed), self.now)
        for lease_id in renewed & self.sessions[session_id].leases:
            lease = self.leases[lease_id]
            lease.expiry = max(lease.expiry, self.now + lease.duration)
        self.sessions[session_id].last_seen = self.now

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session_id = self.draw_session(data)
        self.refuses(InvalidRequestError, lambda: self.state.fenced(session_id))
        self.state.end_session(session_id, self.now)
        session = self.sessions[session_id]
        session.ended = True
        kept = {k: s for k, s in self.announced[session.pool].items() if s not in session.held}
        self.announced[session.pool] = kept
        held = self.handoffs[session.pool]
        self.handoffs[session.pool] = {k: hold for k, hold in held.items() if hold[0] != session_id}
        self.refuses(NotFoundError, lambda: self.state.match(session_id, KEYS[0], 0, self.now))
        self.settle()

    @precondition(lambda self: len(self.live()) < len(self.sessions))
    @rule()
    def fenced(self) -> None:
        ended = [session_id for session_id, session in self.sessions.items() if session.ended]
        assert self.state.fencing() == ended
        self.state.fenced(ended[0])
        session = self.sessions[ended[0]]
        for lease_id in session.leases:
            del self.leases[lease_id]
        self.gave_back(session.pool, set(session.held))
        del self.sessions[ended[0]]
        self.unleased()
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        silent = self.state.tick(self.now)
        assert silent == [s for s in self.live() if self.now - self.sessions[s].last_seen > TIMEOUT]
        for lease_id, lease in list(self.leases.items()):
            if lease.expiry <= self.now and not self.sessions[lease.session].ended:
                self.sessions[lease.session].leases.remove(lease_id)
                del self.leases[lease_id]
        self.unleased()
        for name, held in self.handoffs.items():
            self.handoffs[name] = {k: hold for k, hold in held.items() if hold[1] > self.now}
        self.settle(evictions=True)
        for name in self.blocks:
            pool = self.pool(name)
            assert pool.owned == 0 or not pool.idle
            if sum(map(len, self.extents.values())) == EXTENTS and pool.free < self.low * pool.owned:
                assert not self.evictable(name)

    @rule()
    def top_up(self) -> None:
        short = {s: self.credits(s) - len(m.held) for s, m in self.sessions.items() if not m.ended}
        for session_id, grant in self.state.top_up(self.now):
            assert 0 < len(grant) <= short[session_id]
            for slot, generation in zip(grant.slots.tolist(), grant.generations.tolist(), strict=True):
                self.sessions[session_id].held[slot] = generation
        self.settle(evictions=True)

    # Blocks

    @precondition(lambda self: self.live())
    @rule(data=st.data(), count=st.integers(1, 7))
    def reserve(self, data: st.DataObject, count: int) -> None:
        self.reserve_slots(self.draw_session(data), count)

    def reserve_slots(self, session_id: bytes, count: int) -> None:
        pool = self.pool(self.sessions[session_id].pool)
        free, own = pool.free, set(pool.extents)
        evicted = pool.counters.evicted_blocks
        grant = self.state.reserve(session_id, count, self.now)
        if own == set(pool.extents):
            assert pool.counters.evicted_blocks - evicted == max(0, len(grant) - free)
        self.sessions[session_id].last_seen = self.now
        self.took(session_id, grant, count)

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), new_keys=some_keys, lease_ms=lease_lengths)
    def seal(self, data: st.DataObject, new_keys: list[bytes], lease_ms: int) -> None:
        session_id = data.draw(st.sampled_from(self.holders()))
        parents = [data.draw(st.sampled_from([ROOT, *KEYS])) for _ in new_keys]
        self.seal_held(session_id, new_keys, parents, lease_ms, self.draw_lease(data, session_id, lease_ms))

    def draw_lease(self, data: st.DataObject, session_id: bytes, lease_ms: int) -> int:
        """A lease to add to: often one of the session's, at times one that it does not have, or none."""
        own = sorted(self.sessions[session_id].leases)
        return data.draw(st.sampled_from([0, *own, *own, 999, *self.leases])) if lease_ms else 0

    @precondition(lambda self: self.live())
    @rule(
        data=st.data(), start=st.integers(0, len(KEYS) - 1), count=st.integers(1, 7), lease_ms=lease_lengths
    )
    def save_chain(self, data: st.DataObject, start: int, count: int, lease_ms: int) -> None:
        """Reserve and seal in one, in the way of an engine: the next blocks of a chain."""
        session_id = self.draw_session(data)
        new_keys = KEYS[start : start + count]
        self.reserve_slots(session_id, len(new_keys))
        if self.sessions[session_id].held:
            parents = [KEYS[start - 1] if start else ROOT, *new_keys]
            lease_id = self.draw_lease(data, session_id, lease_ms)
            self.seal_held(session_id, new_keys, parents, lease_ms, lease_id)

    def holders(self) -> list[bytes]:
        return [session_id for session_id in self.live() if self.sessions[session_id].held]

    def seal_held(
        self, session_id: bytes, new_keys: list[bytes], parents: list[bytes], lease_ms: int, lease_id: int
    ) -> None:
        """Seals as many of the keys as the session holds slots."""
        session = self.sessions[session_id]
        blocks = self.blocks[session.pool]
        entries = list(zip(new_keys, parents, sorted(session.held), strict=False))
        sealed = self.state.seal(
            session_id,
            b"".join(k for k, _, _ in entries),
            b"".join(parent for _, parent, _ in entries),
            np.array([slot for _, _, slot in entries], np.uint32),
            np.array([session.held[slot] for _, _, slot in entries], np.uint32),
            self.now,
            lease_ms,
            lease_id,
        )
        new: set[bytes] = set()
        for k in {k for k, _, _ in entries} - blocks.keys():
            self.held_from_now_on(session.pool, k)
        for (k, parent, slot), status in zip(entries, sealed.status.tolist(), strict=True):
            assert status == (2 if k in blocks else 1)
            if status == 1:
                blocks[k] = Block(slot, session.held.pop(slot), parent if parent in blocks else b"")
                new.add(k)
                self.sealed_under(session.pool, slot, k)
            elif not lease_ms:
                del session.held[slot]
                self.gave_back(session.pool, {slot})
        if new and lease_id in session.leases:
            assert sealed.lease_id == lease_id
            lease, seconds = self.leases[lease_id], lease_ms / 1000
            lease.keys |= new
            lease.duration = max(lease.duration, seconds)
            lease.expiry = max(lease.expiry, self.now + seconds)
        else:
            self.leased_now(session_id, sealed.lease_id, new, lease_ms)
        session.last_seen = self.now
        self.took(session_id, sealed.grant, self.credits(session_id) - len(session.held))

    def held_from_now_on(self, name: str, k: bytes) -> None:
        """Books the hold on a block that was announced with one, by whomever."""
        if k in self.announced[name] and k in self.to_hold[name]:
            slot = self.announced[name][k]
            (writer,) = (s for s, m in self.sessions.items() if m.pool == name and slot in m.held)
            self.handoffs[name][k] = (writer, self.now + self.to_hold[name][k])

    def sealed_under(self, name: str, slot: int, k: bytes) -> None:
        """Books what becomes of announcements and of leases on a slot that was being written."""
        self.announced[name].pop(k, None)
        self.announced[name] = {other: s for other, s in self.announced[name].items() if s != slot}
        for lease in self.leases.values():
            if self.sessions[lease.session].pool == name and slot in lease.slots:
                lease.slots.remove(slot)
                lease.keys.add(k)

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), new_keys=some_keys, hold_ms=lease_lengths)
    def announce(self, data: st.DataObject, new_keys: list[bytes], hold_ms: int) -> None:
        session_id = data.draw(st.sampled_from(self.holders()))
        session = self.sessions[session_id]
        entries = list(zip(new_keys, data.draw(st.permutations(sorted(session.held))), strict=False))
        self.state.announce(
            session_id,
            b"".join(k for k, _ in entries),
            np.array([slot for _, slot in entries], np.uint32),
            np.array([session.held[slot] for _, slot in entries], np.uint32),
            self.now,
            hold_ms,
        )
        announced, to_hold = self.announced[session.pool], self.to_hold[session.pool]
        for k, slot in entries:
            if k not in self.blocks[session.pool] and k not in announced:
                for other in [other for other, s in announced.items() if s == slot]:
                    del announced[other]
                announced[k] = slot
                to_hold.pop(k, None)
                to_hold |= {k: hold_ms / 1000} if hold_ms else {}
        session.last_seen = self.now

    @rule(name=names, taken=few_keys)
    def taken(self, name: str, taken: list[bytes]) -> None:
        self.state.taken(POOLS[name].pool_id(), b"".join(taken))
        if name in self.blocks and self.pool(name).spec == POOLS[name]:
            for k in taken:
                self.handoffs[name].pop(k, None)
        self.settle()

    @precondition(lambda self: self.live())
    @rule(
        data=st.data(), fault=st.sampled_from(["slot", "generation", "twice", "zero key", "length", "hold"])
    )
    def announce_refused(self, data: st.DataObject, fault: str) -> None:
        session_id = self.draw_session(data)
        held = self.sessions[session_id].held
        slots, generations = [*held][:1], [*held.values()][:1]
        block_keys, error = KEYS[: len(slots)], SlotNotHeldError
        if fault == "slot" or not slots:
            slots, generations, block_keys = [2**32 - 1], [1], KEYS[:1]
        elif fault == "generation":
            generations[-1] += 1
        elif fault == "twice":
            slots, generations, block_keys = slots * 2, generations * 2, KEYS[:2]
        else:
            block_keys = {"zero key": [ROOT], "length": KEYS[:2], "hold": block_keys}[fault]
            error = InvalidRequestError
        hold_ms = MAX_LEASE_MS + (fault == "hold" and error is InvalidRequestError)
        arguments = (np.array(slots, np.uint32), np.array(generations, np.uint32), self.now, hold_ms)
        self.refuses(error, lambda: self.state.announce(session_id, b"".join(block_keys), *arguments))

    @precondition(lambda self: any(self.announced.values()))
    @rule(data=st.data(), most=st.integers(0, 3), lease_ms=st.sampled_from([0, *[3000] * 5]))
    def match_coming(self, data: st.DataObject, most: int, lease_ms: int) -> None:
        with_some = [s for s in self.live() if self.announced[self.sessions[s].pool]]
        if not with_some:
            return
        session_id = data.draw(st.sampled_from(with_some))
        session = self.sessions[session_id]
        blocks, announced = self.blocks[session.pool], self.announced[session.pool]
        wanted = [
            *data.draw(st.lists(st.sampled_from(sorted(blocks)), max_size=2) if blocks else st.just([])),
            *data.draw(st.lists(st.sampled_from(sorted(announced)), min_size=1, max_size=4, unique=True)),
            data.draw(st.sampled_from(KEYS)),
        ]
        prefix = list(takewhile(lambda k: k in blocks, wanted))
        behind = list(takewhile(lambda k: k in announced, wanted[len(prefix) :]))[: most if lease_ms else 0]
        if not session.held.keys().isdisjoint(announced[k] for k in behind):
            return  # who writes a slot does not lease it as well
        match, coming = self.state.match_coming(session_id, b"".join(wanted), lease_ms, most, self.now)
        assert match.slots.tolist() == [blocks[k].slot for k in prefix]
        assert coming.slots.tolist() == [announced[k] for k in behind]
        writers = [s for s in self.sessions.values() if s.pool == session.pool]
        held = {slot: generation for s in writers for slot, generation in s.held.items()}
        assert coming.generations.tolist() == [held[announced[k]] for k in behind]
        slots = {announced[k] for k in behind}
        self.leased_now(session_id, match.lease_id, set(prefix), lease_ms, slots)
        if behind:
            keys, row = b"".join(behind), coming.slots
            assert self.state.progress(self.pool(session.pool).pool_id, keys, row) == (0, len(behind))
        session.last_seen = self.now
        self.settle()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), fault=faults)
    def seal_refused(self, data: st.DataObject, fault: str) -> None:
        session_id = self.draw_session(data)
        held = self.sessions[session_id].held
        slots, generations = [*held][:2], [*held.values()][:2]
        block_keys, error, lease_ms = KEYS[: len(slots)], SlotNotHeldError, 0
        if fault == "slot" or not slots:
            taken = data.draw(st.sampled_from([slot for slot in [*range(20), 2**32 - 1] if slot not in held]))
            slots, generations = [*slots, taken], [*generations, 1]
            block_keys = KEYS[: len(slots)]
        elif fault == "generation":
            generations[-1] += 1
        elif fault == "twice":
            slots, generations, block_keys = slots * 2, generations * 2, KEYS[: 2 * len(slots)]
        else:
            error, lease_ms = InvalidRequestError, MAX_LEASE_MS + (fault == "lease")
            block_keys = {
                "zero key": [*block_keys[:-1], ROOT],
                "short key": [*block_keys[:-1], b"x" * 31],
                "length": [*block_keys, KEYS[9]],
                "lease": block_keys,
            }[fault]
        arguments = (np.array(slots, np.uint32), np.array(generations, np.uint32), self.now, lease_ms)
        parents = bytes(32 * len(block_keys))
        self.refuses(error, lambda: self.state.seal(session_id, b"".join(block_keys), parents, *arguments))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), count=st.integers(1, 8), lease_ms=lease_lengths)
    def match(self, data: st.DataObject, count: int, lease_ms: int) -> None:
        with_blocks = [
            session_id for session_id in self.live() if self.blocks[self.sessions[session_id].pool]
        ]
        session_id = data.draw(st.sampled_from(with_blocks or self.live()))
        session = self.sessions[session_id]
        blocks = self.blocks[session.pool]
        first = KEYS.index(data.draw(st.sampled_from(sorted(blocks) or KEYS)))
        wanted = [*KEYS[first : first + count], data.draw(st.sampled_from(KEYS))]
        prefix = []
        for k in wanted:
            if k not in blocks:
                break
            prefix.append(k)
        match = self.state.match(session_id, b"".join(wanted), lease_ms, self.now)
        assert match.slots.tolist() == [blocks[k].slot for k in prefix]
        assert match.generations.tolist() == [blocks[k].generation for k in prefix]
        self.leased_now(session_id, match.lease_id, set(prefix), lease_ms)
        session.last_seen = self.now
        self.settle()

    def leased_now(
        self,
        session_id: bytes,
        lease_id: int,
        leased: set[bytes],
        lease_ms: int,
        slots: Collection[int] = (),
    ) -> None:
        """Books the lease of a match or a seal; none when there is nothing to lease. slots: being written."""
        assert (lease_id > 0) == bool((leased or slots) and lease_ms)
        assert lease_id not in self.leases
        if lease_id:
            seconds = lease_ms / 1000
            self.leases[lease_id] = LeaseModel(session_id, leased, seconds, self.now + seconds, set(slots))
            self.sessions[session_id].leases.add(lease_id)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session_id = self.draw_session(data)
        session = self.sessions[session_id]
        lease_ids = data.draw(st.sets(st.sampled_from([999, *self.leases])))
        held = st.sampled_from(sorted(session.held)) if session.held else st.nothing()
        slots = data.draw(st.lists(held, unique=True))
        released = self.state.release(
            session_id,
            sorted(lease_ids),
            np.array(slots, np.uint32),
            np.array([session.held.pop(slot) for slot in slots], np.uint32),
            self.now,
        )
        own = lease_ids & session.leases
        assert (released.leases, released.slots) == (len(own), len(slots))
        session.leases -= own
        for lease_id in own:
            del self.leases[lease_id]
        self.gave_back(session.pool, set(slots))
        self.unleased()
        session.last_seen = self.now
        self.settle()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
