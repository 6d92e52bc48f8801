"""StoreState: the whole store without its wire, its memory and its clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence

import numpy as np

from kvsieve_store.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PoolMismatchError,
    SettingsError,
    UnavailableError,
)
from kvsieve_store.protocol.layout import ExtentLayout, SlotLayout
from kvsieve_store.protocol.limits import MAX_BATCH, MAX_CREDITS, MAX_LEASE_MS, MAX_MATCH_KEYS
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.state import admin
from kvsieve_store.state.arrays import SlotArray, U32Array, as_keys, as_slots, each_once
from kvsieve_store.state.changes import Changes
from kvsieve_store.state.checks import block_keys, check_length, check_range
from kvsieve_store.state.extents import ExtentLedger
from kvsieve_store.state.leases import Lease, LeaseBook
from kvsieve_store.state.pool import Pool
from kvsieve_store.state.pools import PoolTable
from kvsieve_store.state.results import (
    BlockPage,
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
from kvsieve_store.state.sessions import Session, SessionTable
from kvsieve_store.state.settings import StateSettings

_TICK_EVICTIONS = 4096
"""Most blocks that one tick evicts per pool, so that a tick stays short."""


class StoreState:
    """Pools, sessions and leases of one store.

    Every method is atomic: one that raises has changed nothing. `now` is in seconds on a clock that never
    goes back. Keys are 32 bytes each, end to end. Errors are those of kvsieve_store.errors.
    """

    def __init__(self, settings: StateSettings, changes: Changes | None = None) -> None:
        """changes: told of blocks that come and go. Raises SettingsError for a quota smaller than an
        extent."""
        named = {f"quotas[{name}]": quota for name, quota in settings.quotas.items()}
        for field, quota in {"pool_quota": settings.pool_quota_bytes, **named}.items():
            if quota and quota < settings.extent_bytes:
                raise SettingsError(
                    f"{field}: {quota} bytes given, at least one extent ({settings.extent_bytes}) required"
                )
        self._settings = settings
        self._changes = changes
        self._pools = PoolTable()
        self._sessions = SessionTable(settings.max_sessions)
        self._leases = LeaseBook()
        self._extents = ExtentLedger(settings.extents, self._pools.values)
        self._draining = False

    # Sessions

    def attach(
        self,
        spec: PoolSpec,
        *,
        engine_id: str,
        client: str,
        pid: int,
        credit_target: int,
        session_id: bytes,
        now: float,
    ) -> tuple[Session, Grant]:
        """Starts a session in the pool of `spec`, which is made if need be, and grants its credits.

        Raises InvalidRequestError, UnavailableError (draining), CapacityError (sessions, slot size),
        PoolMismatchError.
        """
        self._check_serving()
        check_range("engine_id (characters)", len(engine_id), 1, 256)
        check_range("client (characters)", len(client), 0, 256)
        check_range("credit_target", credit_target, 0, MAX_CREDITS)
        self._sessions.check_room(session_id)
        pool = self._pool_for(spec, now)
        self._pools[spec.name] = pool
        session = Session(
            session_id=session_id,
            ordinal=self._sessions.next_ordinal(),
            pool=pool,
            engine_id=engine_id,
            client=client,
            pid=pid,
            credit_target=credit_target,
            attached_at=now,
            last_seen=now,
        )
        self._sessions.add(session)
        pool.attached += 1
        pool.last_used = now
        return session, self._top_up(session)

    def heartbeat(self, session_id: bytes, renew_leases: Sequence[int], now: float) -> None:
        """Keeps a session alive and extends leases by their own duration; unknown leases are skipped."""
        session = self._sessions.get(session_id)
        check_range("renew_leases (count)", len(renew_leases), 0, MAX_BATCH)
        for lease_id in renew_leases:
            self._leases.renew(session, lease_id, now)
        _seen(session, now)

    def end_session(self, session_id: bytes, now: float) -> None:
        """Ends a session: it can do nothing more, but keeps slots and leases until fenced()."""
        session = self._sessions.find(session_id)
        if session.ended:
            return
        session.ended = True
        session.pool.withdraw(session.ordinal)
        self._leases.hold(session)
        session.pool.attached -= 1
        session.pool.fencing += 1
        session.pool.last_used = now

    def fenced(self, session_id: bytes) -> None:
        """Says that no process can touch an ended session's slots: they are free, its leases gone."""
        session = self._sessions.find(session_id)
        if not session.ended:
            raise InvalidRequestError("session_id: the session is attached; end it first")
        for lease_id in list(session.leases):
            self._unlease(session, lease_id)
        pool = session.pool
        if session.held:
            pool.give_back(pool.held_by(session.ordinal))
        pool.fencing -= 1
        self._sessions.remove(session)

    def fencing(self) -> list[bytes]:
        """Ids of the sessions that wait for fenced()."""
        return [session.session_id for session in self._sessions.fencing()]

    def session(self, session_id: bytes) -> Session:
        """An attached session. Raises NotFoundError."""
        return self._sessions.get(session_id)

    def spec_of(self, pool_id: bytes) -> PoolSpec:
        """The spec of the pool with this id. Raises NotFoundError."""
        pool = self._pools.with_id(pool_id)
        if pool is None:
            raise NotFoundError(f"pool_id: there is no pool {pool_id[:32].hex()!r}")
        return pool.spec

    def spec_named(self, name: str) -> PoolSpec | None:
        """The spec of the pool of this name, if there is one."""
        pool = self._pools.get(name)
        return pool.spec if pool is not None else None

    # Blocks

    def has(self, pool_id: bytes, key: bytes) -> bool:
        """Whether the pool has the block, sealed; counts as no look-up."""
        pool = self._pools.with_id(pool_id)
        return pool is not None and len(pool.find_prefix(as_keys("keys", key, 1, 1))) > 0

    def is_coming(self, pool_id: bytes, key: bytes) -> bool:
        """Whether a slot of the pool is being written under the key."""
        pool = self._pools.with_id(pool_id)
        return pool is not None and bool(pool.announced.find_prefix(as_keys("keys", key, 1, 1), 1))

    def walk(self) -> Iterator[tuple[bytes, bytes]]:
        """Family id and keys of all sealed blocks, an extent a time: those that are there when it is its
        turn. The state may change between two extents; a block that is sealed meanwhile may be left out."""
        for pool in list(self._pools.values()):
            for extent in list(pool.extents):
                if len(keys := pool.sealed_keys(extent)):
                    yield pool.family_id, keys.tobytes()

    def match(self, session_id: bytes, keys: bytes, lease_ms: int, now: float) -> Match:
        """Longest sealed prefix of `keys`, leased for `lease_ms` milliseconds (0: not leased).

        Raises CapacityError when the session has leased too much already.
        """
        return self.match_coming(session_id, keys, lease_ms, 0, now)[0]

    def match_coming(
        self, session_id: bytes, keys: bytes, lease_ms: int, most: int, now: float
    ) -> tuple[Match, Grant]:
        """match(), and in the same lease the slots that other sessions write for up to `most` of the keys
        behind: none is granted again before it ends, whatever its writer does. lease_ms 0 finds none."""
        self._check_serving()
        session = self._sessions.get(session_id)
        wanted = as_keys("keys", keys, 1, MAX_MATCH_KEYS)
        check_range("lease_ms", lease_ms, 0, MAX_LEASE_MS)
        pool = session.pool
        slots = pool.find_prefix(wanted)
        more = pool.announced.find_prefix(wanted[len(slots) :], most if lease_ms else 0)
        coming, generation = np.array(more, np.intp), pool.table.generation
        lease_id = self._lease(session, np.append(slots, coming) if more else slots, lease_ms, now)
        pool.visit(slots, len(wanted))
        _seen(session, now)
        match = Match(slots.astype(np.uint32), generation[slots], lease_id)
        return match, Grant(coming.astype(np.uint32), generation[coming])

    def announce(
        self,
        session_id: bytes,
        keys: bytes,
        slots: U32Array,
        generations: U32Array,
        now: float,
        hold_ms: int = 0,
    ) -> None:
        """Says which keys held slots are to be sealed under: match_coming() finds them until they are sealed,
        given back, or the session ends. Sealed keys, and those announced for other slots, are skipped.

        hold_ms: what is sealed under these keys stays until taken(), so many milliseconds at most, and no
        longer than the session; 0: it may be evicted at once."""
        session = self._sessions.get(session_id)
        new = block_keys(keys)
        check_length("slots", len(slots), "keys", len(new))
        check_length("generations", len(generations), "keys", len(new))
        check_range("hold_ms", hold_ms, 0, MAX_LEASE_MS)
        at = session.pool.check_held(session.ordinal, slots, generations)
        session.pool.announce(new, at, hold_ms / 1000)
        _seen(session, now)

    def taken(self, pool_id: bytes, keys: bytes) -> None:
        """These blocks need no hold of an announcement any more; unknown ones are skipped."""
        pool = self._pools.with_id(pool_id)
        if pool is not None and pool.handoffs and keys:
            pool.taken(as_keys("keys", keys, 1, MAX_MATCH_KEYS))

    def progress(self, pool_id: bytes, keys: bytes, slots: U32Array) -> tuple[int, int]:
        """Of slots that match_coming() gave, and are leased: how many, from the first on, are sealed under
        their keys; how many are so or may still be."""
        pool = self._pools.with_id(pool_id)
        assert pool is not None
        return pool.progress(as_keys("keys", keys, 1, MAX_MATCH_KEYS), as_slots(slots))

    def reserve(self, session_id: bytes, count: int, now: float) -> Grant:
        """Grants up to `count` slots beyond the session's credits, as many as can be had."""
        self._check_serving()
        session = self._sessions.get(session_id)
        check_range("count", count, 1, MAX_BATCH)
        _seen(session, now)
        grant = self._grant(session, count)
        session.pool.counters.denied_slots += count - len(grant)
        return grant

    def seal(
        self,
        session_id: bytes,
        keys: bytes,
        parents: bytes,
        slots: U32Array,
        generations: U32Array,
        now: float,
        lease_ms: int = 0,
        lease_id: int = 0,
    ) -> Sealed:
        """Makes written slots findable by key, all or none, and tops the session up.

        parents: per entry the key of the block before; all zero for the first of a chain. One that is not
        there (yet) is taken as none.
        lease_ms: what is sealed is leased for so many milliseconds, and a duplicate's slot stays with the
        session; 0: nothing is leased, and a duplicate's slot is free.
        lease_id: the session's lease that it is added to; 0, or one that is gone: a new one.
        Raises CapacityError when the session has leased too much already.
        """
        session = self._sessions.get(session_id)
        new = block_keys(keys)
        above = as_keys("parents", parents, 1, MAX_BATCH)
        check_length("parents", len(above), "keys", len(new))
        check_length("slots", len(slots), "keys", len(new))
        check_length("generations", len(generations), "keys", len(new))
        check_range("lease_ms", lease_ms, 0, MAX_LEASE_MS)
        if lease_id and not lease_ms:
            raise InvalidRequestError(f"lease_id: {lease_id} given without lease_ms")
        pool = session.pool
        at = pool.check_held(session.ordinal, slots, generations)
        fresh = pool.fresh(new)
        lease_id = self._lease(session, at[fresh], lease_ms, now, self._leases.find(session, lease_id))
        status = pool.seal(new, above, at, fresh, now)
        session.held -= int(np.count_nonzero(fresh))
        if not lease_ms:
            self._give_back(session, at[~fresh])
        _seen(session, now)
        return Sealed(status, self._top_up(session), lease_id)

    def release(
        self,
        session_id: bytes,
        lease_ids: Sequence[int],
        slots: U32Array,
        generations: U32Array,
        now: float,
    ) -> Released:
        """Gives back leases and unused slots; leases that are gone already are skipped."""
        session = self._sessions.get(session_id)
        check_range("lease_ids (count)", len(lease_ids), 0, MAX_BATCH)
        check_range("slots (count)", len(slots), 0, MAX_BATCH)
        check_length("generations", len(generations), "slots", len(slots))
        at = session.pool.check_held(session.ordinal, slots, generations)
        leases = sum(self._unlease(session, lease_id) for lease_id in lease_ids)
        self._give_back(session, at)
        _seen(session, now)
        return Released(leases, len(at))

    # Time

    def top_up(self, now: float, but: Container[bytes] = ()) -> list[tuple[bytes, Grant]]:
        """Grants what attached sessions lack to their credit target, as far as slots can be had.

        but: ids of sessions that get nothing now.
        """
        if self._draining:
            return []
        short = [
            session
            for session in self._sessions.attached()
            if session.held < session.credits and session.session_id not in but
        ]
        grants = [(session.session_id, self._top_up(session)) for session in short]
        return [(session_id, grant) for session_id, grant in grants if len(grant)]

    def tick(self, now: float) -> list[bytes]:
        """What time brings: leases run out, pools are kept from running full, unused ones go.

        Returns the sessions that were silent for longer than the time-out; ending them is the caller's part.
        """
        for lease in self._leases.take_expired(now):
            pool = lease.session.pool
            pool.unlease(lease.slots)
            pool.counters.expired_leases += 1
        for pool in list(self._pools.values()):
            pool.unlease(pool.handoffs.take_expired(now))
            self._keep_free(pool)
            if pool.idle:
                self._remove_pool(pool)
        limit = now - self._settings.session_timeout
        return [session.session_id for session in self._sessions.attached() if session.last_seen < limit]

    def drain(self) -> None:
        """From now on attach, match and reserve raise UnavailableError, and nothing is granted."""
        self._draining = True

    # Operators

    def list_pools(self) -> list[PoolRow]:
        return [admin.pool_row(pool) for pool in self._pools.values()]

    def list_sessions(self, now: float) -> list[SessionRow]:
        return [admin.session_row(session, now) for session in self._sessions.all()]

    def list_blocks(self, pool_ref: str, page_size: int, page_token: str) -> BlockPage:
        """pool_ref: name, or at least 8 hex digits of the id. page_size 0: 100."""
        return admin.block_page(self._pools.find(pool_ref), page_size, page_token)

    def evict(self, pool_ref: str, keys: bytes, count: int, now: float) -> Evicted:
        """Drops the named blocks with their descendants, or the `count` coldest blocks."""
        pool = self._pools.find(pool_ref)
        if bool(keys) == bool(count):
            raise InvalidRequestError("keys, count: give one of them")
        if keys:
            return admin.evict_keys(pool, as_keys("keys", keys, 1, MAX_BATCH))
        check_range("count", count, 1, 2**32 - 1)
        return admin.evict_coldest(pool, count)

    def pin(self, pool_ref: str, keys: bytes) -> Pinned:
        """Protects blocks, and with them their ancestors, from eviction."""
        return admin.pin(self._pools.find(pool_ref), as_keys("keys", keys, 1, MAX_BATCH))

    def unpin(self, pool_ref: str, keys: bytes) -> Unpinned:
        """Undoes pin(); no keys: every pin of the pool."""
        return admin.unpin(self._pools.find(pool_ref), as_keys("keys", keys, 0, MAX_BATCH))

    def clear(self, pool_ref: str) -> Cleared:
        """Drops every block that is not leased, of one pool or ("") of all."""
        pools = [self._pools.find(pool_ref)] if pool_ref else list(self._pools.values())
        done = [admin.clear(pool) for pool in pools]
        return Cleared(sum(each.dropped for each in done), sum(each.skipped for each in done))

    # Numbers

    def counters(self) -> dict[str, Counters]:
        """A copy of each pool's counters, by pool name."""
        return {name: dataclasses.replace(pool.counters) for name, pool in self._pools.items()}

    def totals(self) -> Totals:
        """The gauges of the whole store."""
        pools = self._pools.values()
        attached = len(self._sessions.attached())
        return Totals(
            arena_bytes=self._settings.extents * self._settings.extent_bytes,
            owned_bytes=(self._settings.extents - self._extents.free) * self._settings.extent_bytes,
            sealed_bytes=sum(pool.sealed * pool.layout.slot_bytes for pool in pools),
            pools=len(pools),
            sessions=attached,
            fencing_sessions=len(self._sessions) - attached,
            sealed_blocks=sum(pool.sealed for pool in pools),
            leases=len(self._leases),
            held_blocks=sum(len(pool.handoffs) for pool in pools),
        )

    # Inside

    def _check_serving(self) -> None:
        if self._draining:
            raise UnavailableError("the store is draining: it takes no new sessions, matches or reservations")

    def _pool_for(self, spec: PoolSpec, now: float) -> Pool:
        """The pool of `spec`, a new one if there is none by that name, or an idle one of another spec."""
        pool = self._pools.get(spec.name)
        if pool is not None and pool.spec == spec:
            return pool
        if pool is not None and not pool.idle:
            raise PoolMismatchError(
                f"pool {spec.name!r} holds blocks of another spec: {'; '.join(spec.differences(pool.spec))}. "
                f"Remedy: clear the pool (kvsieve clear {spec.name}) with no engine attached, "
                "or set another name (kvsieve.pool)"
            )
        settings = self._settings
        layout = ExtentLayout.of(settings.extent_bytes, SlotLayout.of(spec).slot_bytes)
        if settings.extents * layout.slots_per_extent >= 2**31:
            raise CapacityError(
                f"pool.planes: slots of {layout.slot_bytes} bytes give the arena more than 2^31 - 1 slots; "
                "use larger blocks or a smaller arena"
            )
        quota = settings.quotas.get(spec.name, settings.pool_quota_bytes) // settings.extent_bytes
        most = min(quota or settings.extents, settings.extents)
        new = Pool(spec, layout, settings.extents, most, now, self._changes)
        if pool is not None:
            self._remove_pool(pool)
        return new

    def _remove_pool(self, pool: Pool) -> None:
        self._extents.release_all(pool)
        del self._pools[pool.spec.name]

    def _grant(self, session: Session, count: int) -> Grant:
        if self._draining or count <= 0:
            return Grant.none()
        self._extents.make_room(session.pool, count)
        grant = session.pool.grant(session.ordinal, count)
        session.held += len(grant)
        return grant

    def _top_up(self, session: Session) -> Grant:
        return self._grant(session, session.credits - session.held)

    def _give_back(self, session: Session, slots: SlotArray) -> None:
        session.pool.give_back(slots)
        session.held -= len(slots)

    def _lease(
        self, session: Session, slots: SlotArray, lease_ms: int, now: float, lease: Lease | None = None
    ) -> int:
        """A lease on the slots, which may be repeated; returns its id, 0 when there is nothing to lease.

        lease: adds to this one, which has none of the slots yet; None: a new one.
        """
        if not lease_ms or not len(slots):
            return 0
        leased = each_once(slots)
        self._leases.check_room(session, leased, lease)
        session.pool.lease(leased)
        if lease is None:
            return self._leases.add(session, leased, lease_ms / 1000, now).lease_id
        self._leases.extend(lease, leased, lease_ms / 1000, now)
        return lease.lease_id

    def _unlease(self, session: Session, lease_id: int) -> bool:
        lease = self._leases.take(session, lease_id)
        if lease is None:
            return False
        session.pool.unlease(lease.slots)
        return True

    def _keep_free(self, pool: Pool) -> None:
        """Evicts up to the high watermark, in steps, once the pool is below the low one and can't grow."""
        low, high = self._settings.free_low * pool.owned, self._settings.free_high * pool.owned
        pool.refilling = not self._extents.can_grow(pool) and pool.free < (high if pool.refilling else low)
        if pool.refilling:
            pool.evict(min(_TICK_EVICTIONS, int(np.ceil(high)) - pool.free))


def _seen(session: Session, now: float) -> None:
    session.last_seen = now
    session.pool.last_used = now
