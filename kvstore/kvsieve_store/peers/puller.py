"""Pulls of blocks from other stores: how many run, for whom, and which of them brings what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.address_patterns import allows
from kvsieve_store.addresses import UnixAddress, parse_address
from kvsieve_store.errors import CapacityError, InvalidRequestError, KVSieveError, UnavailableError
from kvsieve_store.peers.links import PeerLinks
from kvsieve_store.peers.plan import PullPlan
from kvsieve_store.peers.plane import DataPlane
from kvsieve_store.peers.pull import NO_KEY, Common, Pull
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH
from kvsieve_store.server.core import Core
from kvsieve_store.state import Session

MAX_PULLS = 256
"""Under way at a time, with those that give a peer its blocks back."""

MAX_PULLS_PER_SESSION = 96
"""Of these. An engine has 64 hand-offs at a time; they can wait for minutes, and others have to go on."""

MAX_SOURCE = 256
MAX_TIMEOUT_MS = 600_000


class Puller:
    """Runs in the event loop's thread. Slots that a read may write to belong to a session of the store's own,
    and are given to nobody else before the read is known to be over."""

    def __init__(self, core: Core, plane: DataPlane, links: PeerLinks) -> None:
        self._core = core
        self._allowed = core.settings.peer_patterns
        self._common = Common(core, plane, links)
        self._running: dict[asyncio.Timeout, tuple[Session, Pull]] = {}
        self._closing: dict[asyncio.Task[None], Session] = {}

    @property
    def pulls(self) -> int:
        """Under way."""
        return len(self._running)

    @property
    def waits(self) -> int:
        """As Common.waits."""
        return self._common.waits

    async def pull(self, request: pb.PullRequest) -> pb.PullResponse:
        """Raises what kvsieve.v1.Peer.Pull says."""
        session = self._core.state.session(request.session_id)
        keys = keys_of(request)
        plan, error = await self.bring(session, request, keys)
        if error is not None and not plan.present:
            raise UnavailableError(f"pull from {request.source}: {plan.reason}")
        return pb.PullResponse(
            present=plan.present, pulled=plan.pulled, damaged=plan.damaged, reason=plan.reason
        )

    async def bring(
        self, session: Session, request: pb.PullRequest, keys: Sequence[bytes], *, is_fetch: bool = False
    ) -> tuple[PullPlan, KVSieveError | None]:
        """Brings the keys into the session's pool from the request's source; the plan at its end, and the
        last error of the peer.

        is_fetch: from a store that the directory named: it is tried once, and what is held there for a
        hand-off stays held; peer_allow need not name it. Raises InvalidRequestError (source), CapacityError,
        UnavailableError (this store is not ready).
        """
        target = self._target(request.source, is_fetch)
        self._check_room(session)
        inner = self._core.open_inner_session(session.pool.spec, f"peer (pull from {request.source})")
        pull = Pull(self._common, inner, target, keys, request, is_fetch)
        deadline = asyncio.timeout(request.timeout_ms / 1000)
        self._running[deadline] = (session, pull)
        try:
            async with deadline:
                await pull.run()
        except TimeoutError:
            pull.plan.stop(
                "session_id: the session has ended"
                if session.ended
                else f"timeout_ms: {request.timeout_ms} ms have passed"
            )
        finally:
            del self._running[deadline]
            # Behind the answer: nobody who waits for these blocks waits for the peer to have its own back.
            closing = asyncio.create_task(pull.close())
            self._closing[closing] = session
            closing.add_done_callback(self._closing.__delitem__)
        return pull.plan, pull.error

    def coming(self, pool_id: bytes, key: bytes) -> asyncio.Event | None:
        """When a pull, from whichever store, brings the block: what is set once it has brought some, or is
        over."""
        for source in {pull.source for _, pull in self._running.values()}:
            owner = self._common.claims.get((source, pool_id, key))
            if owner is not None:
                return owner.moved
        return None

    def tick(self) -> None:
        """Ends the pulls of sessions that have ended."""
        for deadline, (session, _) in self._running.items():
            if session.ended and not deadline.expired():
                deadline.reschedule(0)

    async def close(self) -> None:
        """Returns once the peers have their blocks back, as far as they listen."""
        if self._closing:
            await asyncio.wait(self._closing)

    def _check_room(self, session: Session) -> None:
        """Raises CapacityError."""
        owners = [owner for owner, _ in self._running.values()] + list(self._closing.values())
        if owners.count(session) >= MAX_PULLS_PER_SESSION:
            raise CapacityError(
                f"pulls: {MAX_PULLS_PER_SESSION} of this session are under way, the most; try again later"
            )
        if len(owners) >= MAX_PULLS:
            raise CapacityError(f"pulls: {MAX_PULLS} are under way, the most; try again later")

    def _target(self, source: str, is_fetch: bool) -> str:
        """What gRPC connects to. Raises InvalidRequestError."""
        if not 1 <= len(source) <= MAX_SOURCE:
            raise InvalidRequestError(f"source: {len(source)} characters given, 1 to {MAX_SOURCE} allowed")
        try:
            address = parse_address(source)
        except ValueError as error:
            raise InvalidRequestError(f"source: {error}") from None
        # Whoever sends requests to an engine may have chosen it.
        if not is_fetch and not allows(self._allowed, address):
            raise InvalidRequestError(
                f"source: {source} is none of the stores in peer_allow; to pull from there start this store "
                f"with --peer-allow {source}"
            )
        if isinstance(address, UnixAddress):
            return address.grpc_target
        if not address.is_loopback and not self._core.settings.allow_insecure_tcp:
            raise InvalidRequestError(
                f"source: {source} is not a loopback address, and TCP here is neither encrypted nor "
                "authenticated; to pull from there all the same start the store with --allow-insecure-tcp"
            )
        return f"dns:///{address.host_port}"


def keys_of(request: pb.PullRequest) -> list[bytes]:
    """Raises InvalidRequestError for keys, parent, timeout_ms or wait_ms."""
    raw: bytes = request.keys
    count, rest = divmod(len(raw), KEY_BYTES)
    if rest or not 1 <= count <= MAX_BATCH:
        raise InvalidRequestError(
            f"keys: {len(raw)} bytes given, 1 to {MAX_BATCH} keys of {KEY_BYTES} bytes allowed"
        )
    if len(request.parent) not in (0, KEY_BYTES):
        raise InvalidRequestError(f"parent: {len(request.parent)} bytes given, 0 or {KEY_BYTES} allowed")
    if not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(f"timeout_ms: {request.timeout_ms} given, 1 to {MAX_TIMEOUT_MS} allowed")
    keys = [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
    if request.wait_ms > MAX_TIMEOUT_MS:
        raise InvalidRequestError(f"wait_ms: {request.wait_ms} given, 0 to {MAX_TIMEOUT_MS} allowed")
    if NO_KEY in keys:
        raise InvalidRequestError(f"keys[{keys.index(NO_KEY)}]: all zero, which stands for no block")
    return keys
