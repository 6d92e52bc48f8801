"""Holds: blocks that are leased for another store until it has pulled them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsieve_store.errors import CapacityError, InvalidRequestError
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH, MAX_LEASE_MS
from kvsieve_store.server.core import Core, InnerSession

MAX_HOLDS = 4096

TAKEN_SECONDS = 60.0
"""How long it is remembered what was taken before its hold came."""

_NONE = np.empty(0, np.uint32)


@dataclass(eq=False, slots=True)
class _Hold:
    """ends: seconds, on the store's clock."""

    lease_id: int
    ends: float


class Holds:
    """Runs in the event loop's thread. One session of the store's own per pool has the leases: a hold
    outlives the engine that asked for it. A hold is named by the last of its keys."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sessions: dict[bytes, InnerSession] = {}
        self._holds: dict[tuple[bytes, bytes], _Hold] = {}
        self._taken: dict[tuple[bytes, bytes], float] = {}
        """Last blocks of what was taken without a hold, and until when that counts; the oldest first."""
        self.taken_holds = 0
        """Ended because the blocks were taken; only grows."""
        self.expired = 0
        """Ended by time; only grows."""

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, session_id: bytes, keys: bytes, hold_ms: int) -> int:
        """How many of the keys, from the first on, are held. None when they have been taken just now, faster
        than the hold came. Raises what kvsieve.v1.Peer.Hold says."""
        core = self._core
        session = core.state.session(session_id)
        count, rest = divmod(len(keys), KEY_BYTES)
        if rest or not 1 <= count <= MAX_BATCH:
            raise InvalidRequestError(
                f"keys: {len(keys)} bytes given, 1 to {MAX_BATCH} keys of {KEY_BYTES} bytes allowed"
            )
        if not 1 <= hold_ms <= MAX_LEASE_MS:
            raise InvalidRequestError(f"hold_ms: {hold_ms} given, 1 to {MAX_LEASE_MS} allowed")
        if len(self._holds) >= MAX_HOLDS:
            raise CapacityError(f"hold_ms: {MAX_HOLDS} hand-offs are held, the most; try again later")
        pool_id = session.pool_id
        if self._taken.pop((pool_id, keys[-KEY_BYTES:]), 0.0) > core.now():
            core.state.taken(pool_id, keys)
            return 0
        holder = self._sessions.get(pool_id)
        if holder is None:
            holder = core.open_inner_session(session.pool.spec, "peer (hand-offs)")
            self._sessions[pool_id] = holder
        try:
            match = core.state.match(holder.session_id, keys, MAX_LEASE_MS, core.now())
            held = len(match.slots)
            if held:
                place = (pool_id, keys[(held - 1) * KEY_BYTES : held * KEY_BYTES])
                self._end(place)
                core.state.taken(pool_id, keys)  # from now on it is this hold that keeps them
                self._holds[place] = _Hold(match.lease_id, core.now() + hold_ms / 1000)
        finally:
            self._close_idle()
        return held

    def taken(self, pool_id: bytes, keys: bytes) -> None:
        """Another store has these blocks now. keys: 32 bytes each, end to end."""
        ended = 0
        for at in range(0, len(keys) if self._holds else 0, KEY_BYTES):
            ended += self._end((pool_id, keys[at : at + KEY_BYTES]))
        if keys and not ended:
            place = (pool_id, keys[-KEY_BYTES:])
            self._taken.pop(place, None)
            self._taken[place] = self._core.now() + TAKEN_SECONDS
            if len(self._taken) > MAX_HOLDS:
                del self._taken[next(iter(self._taken))]
        self.taken_holds += ended
        self._close_idle()

    def tick(self) -> None:
        """Ends what has run out; all once the store drains, since it offers nothing any more."""
        now, draining = self._core.now(), self._core.phase == "draining"
        for place, hold in list(self._holds.items()):
            if draining or now >= hold.ends:
                self.expired += self._end(place)
        while self._taken and next(iter(self._taken.values())) <= now:
            del self._taken[next(iter(self._taken))]
        self._close_idle()

    def _end(self, place: tuple[bytes, bytes]) -> bool:
        hold = self._holds.pop(place, None)
        if hold is None:
            return False
        session_id = self._sessions[place[0]].session_id
        self._core.state.release(session_id, [hold.lease_id], _NONE, _NONE, self._core.now())
        return True

    def _close_idle(self) -> None:
        """Ends the sessions that hold nothing."""
        for pool_id in self._sessions.keys() - {pool_id for pool_id, _ in self._holds}:
            self._core.end_inner_session(self._sessions.pop(pool_id))
