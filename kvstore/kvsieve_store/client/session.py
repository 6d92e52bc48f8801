"""One session with the store: its stream, heartbeats, credits, leases and calls, from Welcome to the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvsieve.v1 import peer_pb2
from kvsieve.v1 import store_pb2 as pb
from kvsieve.v1.peer_pb2_grpc import PeerStub
from kvsieve.v1.store_pb2_grpc import StoreStub
from kvsieve_store.client import batches
from kvsieve_store.client.channel import call_error
from kvsieve_store.client.credits import Credits
from kvsieve_store.client.handles import (
    Attachment,
    Fetch,
    Held,
    Match,
    Pulled,
    SealEntry,
    SealResult,
    SlotRef,
    SlotRefs,
)
from kvsieve_store.errors import KVSieveError, NotFoundError, PoolMismatchError, UnavailableError
from kvsieve_store.protocol.limits import KEY_BYTES, MAX_BATCH

T = TypeVar("T")

_KNOWN = frozenset(result.value for result in SealResult)

_GOODBYE_SECONDS = 1.0
"""Longest wait of close() for calls in flight and the store's last word."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all sessions of a client have in common.

    endpoint: of the store, for messages.
    timeout: deadline of each call, seconds.
    lease_ms: length of leases, milliseconds; 0: none.
    """

    endpoint: str
    timeout: float
    lease_ms: int


class Session:
    """Lives in one event loop. Once it has ended, every call raises UnavailableError.

    A call that moves slots (seal, reserve, release with slots) and is not answered in time ends the session:
    what the store did is unknown then, and only a new session makes both sides agree again.
    """

    def __init__(
        self, stubs: tuple[StoreStub, PeerStub], stream: Any, welcome: pb.Welcome, terms: Terms, epoch: int
    ) -> None:
        self.attachment = Attachment.of(welcome, epoch)
        self.credits = Credits()
        self.credits.grant(welcome.credits)
        self.leases: set[int] = set()
        self._id = welcome.session_id
        self._limits = welcome.limits
        self._lease_ms = min(terms.lease_ms, welcome.limits.max_lease_ms)
        self._beat_seconds = welcome.heartbeat_interval_ms / 1000
        if self._lease_ms:
            # Two heartbeats may come late before a lease runs out.
            self._beat_seconds = min(self._beat_seconds, self._lease_ms / 3000)
        self._stub, self._peers = stubs
        self._stream = stream
        self._terms = terms
        self._calls: set[Any] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Seals go one after another, so that a parent is there before its children.
        self._sealing = asyncio.Lock()
        self._ended: asyncio.Future[KVSieveError] = asyncio.get_running_loop().create_future()

    @staticmethod
    async def attach(channel: grpc.aio.Channel, hello: pb.Hello, terms: Terms, epoch: int) -> Session:
        """Raises what the store refuses with, UnavailableError when no Welcome comes in time."""
        stub = StoreStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Attach()
        try:
            async with asyncio.timeout(terms.timeout):
                # A stream that failed already says why when it is read.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await stream.write(pb.AttachRequest(hello=hello))
                message = await stream.read()
        except TimeoutError:
            stream.cancel()
            raise UnavailableError(f"Attach: no answer from the store at {terms.endpoint} in time") from None
        except grpc.aio.AioRpcError as error:
            raise call_error(error, "Attach", terms.endpoint, PoolMismatchError) from None
        if message is grpc.aio.EOF or message.WhichOneof("message") != "welcome":
            stream.cancel()
            raise UnavailableError(f"Attach: no Welcome from the store at {terms.endpoint}")
        peers = PeerStub(channel)  # type: ignore[no-untyped-call]
        return Session((stub, peers), stream, message.welcome, terms, epoch)

    async def run(self, on_draining: Callable[[], None]) -> KVSieveError:
        """Reads the stream and sends heartbeats until the session has ended; returns why."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._read(on_draining)), loop.create_task(self._beat())]
        for task in tasks:
            task.add_done_callback(self._stream_ended)
        try:
            return await asyncio.shield(self._ended)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, why: KVSieveError) -> None:
        """Drops credits and leases, fails the calls in flight. The first reason counts."""
        if self._ended.done():
            return
        self._ended.set_result(type(why)(*why.args))
        self.credits.close()
        self.leases.clear()
        for call in self._calls:
            call.cancel()
        self._stream.cancel()

    async def close(self) -> None:
        """Lets calls in flight finish, gives back unused credits, ends the session: a second at most.

        Leases go with the session, once no process holds its lock: a reader may still be copying.
        """
        with contextlib.suppress(TimeoutError, KVSieveError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self.release((), self.credits.close())
                if self._tasks:
                    await asyncio.wait(self._tasks)
                await self._stream.done_writing()
                await asyncio.shield(self._ended)
        self.end(UnavailableError("the client is closed"))

    async def match(self, keys: bytes, fetch: Fetch | None = None) -> Match:
        """Longest sealed prefix. A caller that is cancelled leaves no lease behind."""
        task = self._keep(self._match_or_fetch(keys, fetch))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._match_unread)
            raise

    async def seal(self, entries: Sequence[SealEntry], *, hold: bool, lease: int) -> Held:
        """One result per entry. Goes on when the caller is cancelled.

        hold: leases what is sealed and keeps the slots of duplicates; the session must take leases. When it
        fails, or the caller is cancelled, neither is left: all is as after a seal without hold, but for what
        was added to `lease`, which is the caller's.
        """
        task = self._keep(self._seal(entries, self._lease_ms if hold else 0, lease if hold else 0))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if hold:
                task.add_done_callback(lambda done: self._hold_unread(entries, lease, done))
            raise

    async def announce(self, entries: Sequence[SealEntry], hold_seconds: float) -> None:
        """Goes on when the caller is cancelled."""
        await asyncio.shield(self._keep(self._announce(entries, int(hold_seconds * 1000))))

    async def release(self, lease_ids: Sequence[int], refs: Sequence[SlotRef]) -> None:
        """Leases and unused slots back to the store. Goes on when the caller is cancelled."""
        await asyncio.shield(self._keep(self._release(lease_ids, refs)))

    async def reserve(self, count: int) -> int:
        """More credits now; returns how many. Goes on when the caller is cancelled."""
        return await asyncio.shield(self._keep(self._reserve(count)))

    async def pull(
        self, source: str, keys: bytes, parent: bytes, seconds: float, wait_seconds: float = 0.0
    ) -> Pulled:
        """Blocks of another store into this one. One that is cancelled ends it there as well."""
        request = peer_pb2.PullRequest(
            session_id=self._id,
            source=source,
            keys=keys,
            parent=parent,
            timeout_ms=max(int(seconds * 1000), 1),
            wait_ms=int(wait_seconds * 1000),
        )
        reply = await self._call("Pull", self._peers.Pull, request, seconds=seconds + self._terms.timeout)
        return Pulled(reply.present, reply.pulled, reply.damaged, reply.reason)

    async def hold(self, keys: bytes, seconds: float) -> int:
        """Blocks kept for another store; how many."""
        request = peer_pb2.HoldRequest(session_id=self._id, keys=keys, hold_ms=max(int(seconds * 1000), 1))
        reply = await self._call("Hold", self._peers.Hold, request)
        return int(reply.held)

    async def _match_or_fetch(self, keys: bytes, fetch: Fetch | None) -> Match:
        match = await self._match(keys)
        missing = len(keys) // KEY_BYTES - len(match.refs)
        if fetch is None or not self.attachment.directory or missing < fetch.min_blocks:
            return match
        present, fetched = await self._fetch(keys, len(match.refs), fetch.seconds)
        if present == len(match.refs):
            return match
        try:
            longer = await self._match(keys)
        except KVSieveError:
            return match
        self._give_back(match.lease_ids, ())
        return dataclasses.replace(longer, fetched=fetched)

    async def _fetch(self, keys: bytes, present: int, seconds: float) -> tuple[int, int]:
        """Lets the store bring the blocks after the first `present`; how many are present then, and how many
        of them came from other stores. What fails, fails."""
        fetched = 0
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        with contextlib.suppress(KVSieveError):
            while (start := present * KEY_BYTES) < len(keys) and clock() < deadline:
                part = keys[start : start + self._limits.max_batch * KEY_BYTES]
                parent = keys[max(start - KEY_BYTES, 0) : start]
                pulled = await self.pull("", part, parent, deadline - clock())
                present += pulled.present
                fetched += pulled.pulled
                if pulled.present * KEY_BYTES < len(part):
                    break
        return present, fetched

    async def _match(self, keys: bytes) -> Match:
        slots: list[int] = []
        generations: list[int] = []
        leases: list[int] = []
        try:
            limit = self._limits.max_match_keys
            for request in batches.match_requests(self._id, keys, self._lease_ms, limit):
                reply = await self._call("Match", self._stub.Match, request)
                asked, found = len(request.keys) // KEY_BYTES, len(reply.slots)
                if not found == len(reply.generations) <= asked:
                    raise self._nonsense(
                        f"Match: {found} slots and {len(reply.generations)} generations for {asked} keys"
                    )
                slots += reply.slots[:]  # a slice is a list, made at once
                generations += reply.generations[:]
                if reply.lease_id:
                    leases.append(reply.lease_id)
                    self.leases.add(reply.lease_id)
                if found < asked:
                    break
        except KVSieveError:
            self._give_back(leases, ())
            raise
        return Match(SlotRefs(slots, generations), tuple(leases), self.attachment.epoch)

    async def _seal(self, entries: Sequence[SealEntry], lease_ms: int, lease: int) -> Held:
        results: list[SealResult] = []
        leases: list[int] = []  # one, but for leases that ran out in between
        try:
            async with self._sealing:
                limit = self._limits.max_batch
                for request in batches.seal_requests(self._id, entries, lease_ms, lease, limit):
                    if leases:
                        request.lease_id = leases[-1]
                    reply = await self._call("Seal", self._stub.Seal, request, moves_slots=True)
                    if len(reply.status) != len(request.slots) or not _KNOWN.issuperset(reply.status):
                        raise self._nonsense(
                            f"Seal: for {len(request.slots)} entries the statuses {reply.status[:9]}"
                        )
                    self.credits.grant(reply.credits)
                    results += map(SealResult, reply.status)
                    if reply.lease_id and reply.lease_id not in leases:
                        leases.append(reply.lease_id)
                    if reply.lease_id not in (0, request.lease_id):  # that one is renewed already
                        self.leases.add(reply.lease_id)
        except KVSieveError:
            if lease_ms:
                held = Held(results, tuple(leases))
                self._give_back(held.new_leases(lease), held.kept(entries))
            raise
        return Held(results, tuple(leases), self.attachment.epoch)

    async def _announce(self, entries: Sequence[SealEntry], hold_ms: int) -> None:
        for request in batches.announce_requests(self._id, entries, hold_ms, self._limits.max_batch):
            await self._call("Announce", self._stub.Announce, request)

    async def _release(self, lease_ids: Sequence[int], refs: Sequence[SlotRef]) -> None:
        self.leases.difference_update(lease_ids)
        for request in batches.release_requests(self._id, lease_ids, refs, self._limits.max_batch):
            await self._call("Release", self._stub.Release, request, moves_slots=bool(request.slots))

    async def _reserve(self, count: int) -> int:
        granted = 0
        for at in range(0, count, self._limits.max_batch):
            request = pb.ReserveRequest(session_id=self._id, count=min(count - at, self._limits.max_batch))
            reply = await self._call("Reserve", self._stub.Reserve, request, moves_slots=True)
            got = self.credits.grant(reply.credits)
            granted += got
            if got < request.count:
                break
        return granted

    async def _call(
        self, name: str, method: Any, request: Any, moves_slots: bool = False, seconds: float | None = None
    ) -> Any:
        """One unary call with a deadline. Raises errors of kvsieve_store.errors only."""
        if self._ended.done():
            raise self._over()
        call = method(request, timeout=seconds or self._terms.timeout)
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            # end() cancels the call, not the task.
            if not self._ended.done():
                raise
            raise self._over() from None
        except grpc.aio.AioRpcError as error:
            mapped = call_error(error, name, self._terms.endpoint)
            if isinstance(mapped, NotFoundError):
                # The only thing that a call can fail to find is its session.
                self.end(mapped)
                raise self._over() from None
            if moves_slots and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.end(mapped)
            raise mapped from None
        finally:
            self._calls.discard(call)

    async def _read(self, on_draining: Callable[[], None]) -> None:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "credits":
                    self.credits.grant(message.credits)
                case "draining":
                    on_draining()
        raise UnavailableError(f"the store at {self._terms.endpoint} ended the session")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            for heartbeat in batches.heartbeats(list(self.leases), MAX_BATCH):
                # A stream that failed says why to its reader.
                with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await self._stream.write(pb.AttachRequest(heartbeat=heartbeat))

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            error = call_error(error, "Attach", self._terms.endpoint)
        if not isinstance(error, KVSieveError):
            error = UnavailableError(f"the stream to the store at {self._terms.endpoint} broke: {error!r}")
        self.end(error)

    def _match_unread(self, task: asyncio.Task[Match]) -> None:
        """Releases the lease of a match that nobody waits for any more."""
        if not task.cancelled() and task.exception() is None:
            self._give_back(task.result().lease_ids, ())

    def _hold_unread(self, entries: Sequence[SealEntry], lease: int, task: asyncio.Task[Held]) -> None:
        """Releases all that a seal holds for nobody."""
        if not task.cancelled() and task.exception() is None:
            self._give_back(task.result().new_leases(lease), task.result().kept(entries))

    def _give_back(self, lease_ids: Sequence[int], refs: Sequence[SlotRef]) -> None:
        if lease_ids or refs:
            self._keep(self._release(lease_ids, refs))

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that is held until it is done, and whose error may go unread."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _nonsense(self, answer: str) -> UnavailableError:
        """The session can't go on: what the store did is not known."""
        self.end(
            UnavailableError(f"the store at {self._terms.endpoint} answers what makes no sense: {answer}")
        )
        return self._over()

    def _over(self) -> UnavailableError:
        return UnavailableError(f"the session is over: {self._ended.result()}")
