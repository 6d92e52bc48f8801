"""Fetch: a pull from whichever stores the directory says have the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.directory.directory import Directory
from kvsieve_store.directory.holders import Holder
from kvsieve_store.errors import KVSieveError, NotFoundError
from kvsieve_store.peers.puller import Puller, keys_of
from kvsieve_store.server.core import Core
from kvsieve_store.state import Session

MAX_HOLDERS = 3
"""Most stores that one fetch asks, one after another."""


@dataclass(eq=False)
class _Fetch:
    """One under way. present: of its keys, from the first on, this store has so many. pulled, damaged,
    reason: as in PullResponse. deadline: seconds on the loop's clock. over: set at the end."""

    session: Session
    keys: Sequence[bytes]
    parent: bytes
    deadline: float
    present: int = 0
    pulled: int = 0
    damaged: int = 0
    reason: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> Sequence[bytes]:
        return self.keys[self.present :]

    @property
    def last_parent(self) -> bytes:
        return self.keys[self.present - 1] if self.present else self.parent

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do, or no time for it."""
        return not self.missing or self.session.ended or self.milliseconds() == 1

    def milliseconds(self) -> int:
        """That are left; at least 1."""
        return max(int((self.deadline - asyncio.get_running_loop().time()) * 1000), 1)


class Fetcher:
    """Runs in the event loop's thread. A fetch that finds nobody, or reaches nobody, is no error.

    blocks: brought so far; only grows.
    """

    def __init__(self, core: Core, puller: Puller, directory: Directory) -> None:
        self._core = core
        self._puller = puller
        self._directory = directory
        self._running: dict[tuple[bytes, bytes], _Fetch] = {}
        """By pool id and first key that was missing."""
        self.blocks = 0

    async def fetch(self, request: pb.PullRequest) -> pb.PullResponse:
        """Raises what kvsieve.v1.Peer.Pull says for a request without a source."""
        session = self._core.state.session(request.session_id)
        keys = keys_of(request)
        deadline = asyncio.get_running_loop().time() + request.timeout_ms / 1000
        fetch = _Fetch(session, keys, request.parent, deadline)
        pool_id = session.pool_id
        while (
            fetch.missing and not fetch.reason and (other := self._running.get((pool_id, fetch.missing[0])))
        ):
            await self._wait_for(other, fetch)
        if fetch.missing and not fetch.reason:
            name = (pool_id, fetch.missing[0])
            self._running[name] = fetch
            try:
                await self._bring(fetch)
            finally:
                del self._running[name]
                fetch.over.set()
        self.blocks += fetch.pulled
        return pb.PullResponse(
            present=fetch.present, pulled=fetch.pulled, damaged=fetch.damaged, reason=fetch.reason
        )

    async def _wait_for(self, other: _Fetch, fetch: _Fetch) -> None:
        """Another one brings the same blocks, or the first of them."""
        try:
            async with asyncio.timeout(fetch.milliseconds() / 1000):
                await other.over.wait()
        except TimeoutError:
            fetch.reason = "timeout_ms: another request still waits for the same blocks"
            return
        first = other.keys.index(fetch.missing[0])
        both = zip(other.keys[first : other.present], fetch.missing, strict=False)
        fetch.present += next((i for i, (a, b) in enumerate(both) if a != b), other.present - first)
        fetch.present = min(fetch.present, len(fetch.keys))
        same = other.missing and fetch.missing and other.missing[0] == fetch.missing[0]
        if same and not other.session.ended:
            fetch.reason = other.reason

    async def _wait_for_pulls(self, fetch: _Fetch) -> None:
        """What a hand-off or another fetch is bringing is waited for, and not asked for elsewhere."""
        core, pool_id = self._core, fetch.session.pool_id
        while fetch.missing and (moved := self._puller.coming(pool_id, fetch.missing[0])) is not None:
            try:
                async with asyncio.timeout(fetch.milliseconds() / 1000):
                    await moved.wait()
            except TimeoutError:
                fetch.reason = "timeout_ms: another request still waits for the same blocks"
                return
            if core.state.has(pool_id, fetch.missing[0]):
                missing = b"".join(fetch.missing)
                fetch.present += len(core.state.match(fetch.session.session_id, missing, 0, core.now()).slots)

    async def _bring(self, fetch: _Fetch) -> None:
        await self._wait_for_pulls(fetch)
        if not fetch.is_over:
            await self._ask_holders(fetch)
        fetch.reason = (fetch.reason or "no other store is known to have them") if fetch.missing else ""

    async def _ask_holders(self, fetch: _Fetch) -> None:
        before = fetch.present
        holders = await self._directory.locate(fetch.session.pool.family_id, fetch.missing)
        for holder in holders[:MAX_HOLDERS]:
            await self._wait_for_pulls(fetch)
            claimed = fetch.keys[: before + holder.blocks]
            if fetch.is_over or len(claimed) <= fetch.present:
                break  # nobody after it has more
            await self._bring_from(holder, claimed, fetch)

    async def _bring_from(self, holder: Holder, claimed: Sequence[bytes], fetch: _Fetch) -> None:
        pool_id = fetch.session.pool_id
        request = pb.PullRequest(
            source=holder.address, parent=fetch.last_parent, timeout_ms=fetch.milliseconds()
        )
        try:
            plan, error = await self._puller.bring(fetch.session, request, fetch.missing, is_fetch=True)
        except KVSieveError as refused:  # of this store: an address that is not allowed, too many pulls
            fetch.reason = str(refused)
            return
        fetch.present += plan.present
        fetch.pulled += plan.pulled
        fetch.damaged += plan.damaged
        fetch.reason = plan.reason
        asked = fetch.missing and self._puller.coming(pool_id, fetch.missing[0]) is None
        silent = asked and not plan.pulled and not plan.is_exhausted and fetch.milliseconds() == 1
        if silent or (error is not None and not isinstance(error, NotFoundError)):
            self._directory.avoid(holder)
        elif (plan.is_exhausted or error is not None) and fetch.present < len(claimed):
            self._directory.has_not(holder, fetch.session.pool.family_id, claimed[fetch.present :])
