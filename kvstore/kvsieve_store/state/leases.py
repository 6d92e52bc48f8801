"""Leases: promises that sealed blocks stay while someone reads them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.limits import MAX_LEASED, MAX_LEASES
from kvsieve_store.state.arrays import I32Array
from kvsieve_store.state.sessions import Session


@dataclass(slots=True)
class Lease:
    """slots: the leased blocks, in the session's pool, each once. duration: seconds. expiry: its end."""

    lease_id: int
    session: Session
    slots: I32Array
    duration: float
    expiry: float


class LeaseBook:
    """Every lease of the store, by id and by expiry. Counting leases per block is the pool's part."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._heap: list[tuple[float, int]] = []  # an entry may be early (renewed) or stale (gone)
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def find(self, session: Session, lease_id: int) -> Lease | None:
        """A lease of the session; None if it is not there or not the session's."""
        return self._leases[lease_id] if lease_id in session.leases else None

    def check_room(self, session: Session, slots: I32Array, lease: Lease | None = None) -> None:
        """Raises CapacityError when the session may not lease so many more slots, in `lease` or a new one."""
        if lease is None and len(session.leases) >= MAX_LEASES:
            raise CapacityError(f"lease_ms: the session has {MAX_LEASES} leases, the most; release some")
        if session.leased + len(slots) > MAX_LEASED:
            raise CapacityError(
                f"keys: {len(slots)} more slots to lease, the session's leases have {session.leased}, "
                f"{MAX_LEASED} allowed in all; release some"
            )

    def add(self, session: Session, slots: I32Array, duration: float, now: float) -> Lease:
        """Makes a lease of `duration` seconds; ids are positive and never used again."""
        self._last_id += 1
        lease = Lease(self._last_id, session, slots, duration, now + duration)
        self._leases[lease.lease_id] = lease
        session.leases.add(lease.lease_id)
        session.leased += len(slots)
        heapq.heappush(self._heap, (lease.expiry, lease.lease_id))
        return lease

    def extend(self, lease: Lease, slots: I32Array, duration: float, now: float) -> None:
        """Adds slots that the lease does not have yet; it lasts `duration` seconds from now at least."""
        lease.slots = np.concatenate((lease.slots, slots))
        lease.session.leased += len(slots)
        lease.duration = max(lease.duration, duration)
        lease.expiry = max(lease.expiry, now + duration)

    def renew(self, session: Session, lease_id: int, now: float) -> None:
        """Extends a lease by its own duration; one that is not the session's is skipped."""
        if lease := self.find(session, lease_id):
            lease.expiry = max(lease.expiry, now + lease.duration)

    def hold(self, session: Session) -> None:
        """Takes the time limit off the session's leases: only take() ends them."""
        for lease_id in session.leases:
            self._leases[lease_id].expiry = math.inf

    def take(self, session: Session, lease_id: int) -> Lease | None:
        """Removes and returns a lease; None if it is not there or not the session's."""
        if lease_id not in session.leases:
            return None
        session.leases.remove(lease_id)
        lease = self._leases.pop(lease_id)
        session.leased -= len(lease.slots)
        if len(self._heap) > 2 * len(self._leases) + 64:
            self._heap = [(left.expiry, left.lease_id) for left in self._leases.values()]
            heapq.heapify(self._heap)
        return lease

    def take_expired(self, now: float) -> list[Lease]:
        """Removes and returns the leases whose time is up."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, lease_id = heapq.heappop(self._heap)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.expiry > now:
                heapq.heappush(self._heap, (lease.expiry, lease_id))
                continue
            del self._leases[lease_id]
            lease.session.leases.remove(lease_id)
            lease.session.leased -= len(lease.slots)
            expired.append(lease)
        return expired
