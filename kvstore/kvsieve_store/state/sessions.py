"""Sessions: which engines are attached, and which have ended but may still touch their slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsieve_store.errors import CapacityError, InvalidRequestError, NotFoundError
from kvsieve_store.protocol.layout import ExtentLayout
from kvsieve_store.state.pool import Pool


@dataclass(slots=True, eq=False)
class Session:
    """One engine's session.

    ordinal: small number that marks the session's slots, 1 to 65,535, used again after fencing.
    credit_target: slots that the client wants granted ahead. held: slots granted, not sealed or given back.
    leased: slots in all its leases together.
    attached_at, last_seen: seconds, on the caller's clock; any call of the session counts as seen.
    ended: waits until no process can touch its slots ("fencing").
    """

    session_id: bytes = field(repr=False)
    ordinal: int
    pool: Pool = field(repr=False)
    engine_id: str
    client: str
    pid: int
    credit_target: int
    attached_at: float
    last_seen: float
    held: int = 0
    leases: set[int] = field(default_factory=set)
    leased: int = 0
    ended: bool = False

    @property
    def pool_id(self) -> bytes:
        """SHA-256 of the pool's canonical spec."""
        return self.pool.pool_id

    @property
    def credits(self) -> int:
        """Slots to keep granted: the target, within the session's part of a quarter of what the pool may own.

        Credits are memory that holds nothing yet. In a small pool they would push out the blocks just sealed.
        """
        room = self.pool.quota * self.layout.slots_per_extent
        return min(self.credit_target, max(1, room // (4 * max(1, self.pool.attached))))

    @property
    def layout(self) -> ExtentLayout:
        """Where the pool's slots lie."""
        return self.pool.layout

    @property
    def state(self) -> str:
        """ "attached" or "fencing"."""
        return "fencing" if self.ended else "attached"


class SessionTable:
    """Sessions by id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[bytes, Session] = {}
        self._ordinals = list(range(limit, 0, -1))

    def __len__(self) -> int:
        return len(self._sessions)

    def check_room(self, session_id: bytes) -> None:
        """Raises CapacityError when no other session fits, InvalidRequestError when the id is taken."""
        if session_id in self._sessions:
            raise InvalidRequestError("session_id: taken by another session")
        if not self._ordinals:
            waiting = len(self.fencing())
            raise CapacityError(
                f"sessions: {len(self._sessions)} of at most {self._limit} are there, {waiting} have ended "
                "but wait for a process that holds the lock file; end an engine first"
            )

    def next_ordinal(self) -> int:
        """The ordinal that the next session gets; check_room() first."""
        return self._ordinals[-1]

    def add(self, session: Session) -> None:
        ordinal = self._ordinals.pop()
        assert ordinal == session.ordinal
        self._sessions[session.session_id] = session

    def remove(self, session: Session) -> None:
        del self._sessions[session.session_id]
        self._ordinals.append(session.ordinal)

    def get(self, session_id: bytes) -> Session:
        """An attached session. Raises NotFoundError when it is unknown or has ended."""
        session = self._sessions.get(session_id)
        if session is None or session.ended:
            raise NotFoundError(
                "session_id: no such session; it has ended or the store was restarted, attach again"
            )
        return session

    def find(self, session_id: bytes) -> Session:
        """A session, attached or ended. Raises NotFoundError when it is unknown."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError("session_id: no such session")
        return session

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def attached(self) -> list[Session]:
        return [session for session in self._sessions.values() if not session.ended]

    def fencing(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.ended]
