"""The synchronous face: the asyncio core in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from kvsieve_store.client.async_client import AsyncStoreClient
from kvsieve_store.client.batches import check_lease
from kvsieve_store.client.handles import (
    Attachment,
    ClientState,
    Fetch,
    Held,
    Match,
    Pulled,
    SealEntry,
    SealResult,
    SlotRef,
)
from kvsieve_store.errors import KVSieveError, UnavailableError
from kvsieve_store.protocol.spec import PoolSpec

T = TypeVar("T")

_JOIN_SECONDS = 5.0
"""Longest wait for the thread in close(); the core itself says goodbye for at most a second."""


class StoreClient:
    """AsyncStoreClient for code without an event loop. Safe to call from any thread, in the process that
    called start().

    Verbs come twice: `match()` waits, `match_async()` returns a Future at once. Futures may be cancelled: the
    call goes on (a pull ends), and what a cancelled match or hold has leased or kept is given back. Callbacks
    (on_change, and those of Futures) run in the client's thread: they must be short, and can't call what
    waits.
    """

    def __init__(
        self,
        endpoint: str,
        spec: PoolSpec,
        *,
        engine_id: str,
        credit_target: int = 256,
        lease_ms: int = 60_000,
        timeout: float = 5.0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Parameters as for AsyncStoreClient. Connects to nothing before start()."""
        self._core = AsyncStoreClient(
            endpoint,
            spec,
            engine_id=engine_id,
            credit_target=credit_target,
            lease_ms=lease_ms,
            timeout=timeout,
            on_change=on_change,
        )
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pid = 0
        self._closed = False

    def start(self) -> None:
        """Connects in the background, for ever. Returns at once; see wait_attached() and on_change."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            if self._thread is not None:
                return
            self._loop = asyncio.new_event_loop()
            self._pid = os.getpid()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="kvsieve-client", daemon=True
            )
            self._thread.start()
            atexit.register(self.close)

    @property
    def endpoint(self) -> str:
        return self._core.endpoint

    @property
    def state(self) -> ClientState:
        return ClientState.CLOSED if self._closed else self._core.state

    @property
    def error(self) -> KVSieveError | None:
        """Why the client is not attached, as far as known."""
        return self._core.error

    @property
    def attachment(self) -> Attachment | None:
        """Of the current session; None while there is none."""
        return self._core.attachment

    @property
    def credits(self) -> int:
        """Slots that take_credits() could give now."""
        return self._core.credits

    def wait_attached(self, timeout: float) -> Attachment:
        """Raises the store's refusal (PoolMismatchError, InvalidRequestError, CapacityError) as soon as it is
        there, UnavailableError after `timeout` seconds or when the client is closed."""
        return self._wait(self._submit(lambda: self._core.wait_attached(timeout)))

    def take_credits(self, n: int, *, epoch: int | None = None) -> list[SlotRef]:
        """At most `n` free slots to write to, fewer when the store has not granted more, none when `epoch` is
        not the current one. Never waits; see AsyncStoreClient.take_credits()."""
        return self._core.take_credits(n, epoch=epoch)

    def match(self, keys: bytes | Sequence[bytes], *, fetch: Fetch | None = None) -> Match:
        """Longest sealed prefix of `keys` (in chain order), leased until released or the session ends; see
        AsyncStoreClient.match()."""
        return self._wait(self.match_async(keys, fetch=fetch))

    def match_async(self, keys: bytes | Sequence[bytes], *, fetch: Fetch | None = None) -> Future[Match]:
        return self._submit(
            lambda: self._core.match(keys, fetch=fetch),
            unread=lambda match: self._give_back(match.lease_ids, (), match.epoch),
        )

    def pull(
        self,
        source: str,
        keys: bytes | Sequence[bytes],
        *,
        parent: bytes = b"",
        seconds: float = 30.0,
        wait_seconds: float = 0.0,
    ) -> Pulled:
        """Lets the store bring blocks from another one; see AsyncStoreClient.pull()."""
        return self._wait(
            self.pull_async(source, keys, parent=parent, seconds=seconds, wait_seconds=wait_seconds)
        )

    def pull_async(
        self,
        source: str,
        keys: bytes | Sequence[bytes],
        *,
        parent: bytes = b"",
        seconds: float = 30.0,
        wait_seconds: float = 0.0,
    ) -> Future[Pulled]:
        """Cancelling the Future ends the pull."""
        return self._submit(
            lambda: self._core.pull(source, keys, parent=parent, seconds=seconds, wait_seconds=wait_seconds),
            stops=True,
        )

    def hold(self, keys: bytes | Sequence[bytes], *, seconds: float) -> int:
        """Keeps sealed blocks for another store; see AsyncStoreClient.hold()."""
        return self._wait(self.hold_async(keys, seconds=seconds))

    def hold_async(self, keys: bytes | Sequence[bytes], *, seconds: float) -> Future[int]:
        return self._submit(lambda: self._core.hold(keys, seconds=seconds))

    @overload
    def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[False] = False
    ) -> list[SealResult]: ...
    @overload
    def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[True], lease: int = 0
    ) -> Held: ...
    def seal(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: bool = False, lease: int = 0
    ) -> list[SealResult] | Held:
        """Makes written slots findable by key and immutable, and with `hold` keeps all of them readable; see
        AsyncStoreClient.seal()."""
        check_lease(hold, lease)
        if hold:
            return self._wait(self.seal_async(entries, epoch=epoch, hold=True, lease=lease))
        return self._wait(self.seal_async(entries, epoch=epoch))

    @overload
    def seal_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[False] = False
    ) -> Future[list[SealResult]]: ...
    @overload
    def seal_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: Literal[True], lease: int = 0
    ) -> Future[Held]: ...
    def seal_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: bool = False, lease: int = 0
    ) -> Future[list[SealResult]] | Future[Held]:
        check_lease(hold, lease)
        if not hold:
            return self._submit(lambda: self._core.seal(entries, epoch=epoch))
        return self._submit(
            lambda: self._core.seal(entries, epoch=epoch, hold=True, lease=lease),
            unread=lambda held: self._give_back(held.new_leases(lease), held.kept(entries), held.epoch),
        )

    def announce(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold_seconds: float = 0.0
    ) -> None:
        """Lets other stores read slots while they are written; see AsyncStoreClient.announce()."""
        self._wait(self.announce_async(entries, epoch=epoch, hold_seconds=hold_seconds))

    def announce_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold_seconds: float = 0.0
    ) -> Future[None]:
        return self._submit(lambda: self._core.announce(entries, epoch=epoch, hold_seconds=hold_seconds))

    def release(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> None:
        """Gives back leases and slots that will not be sealed; see AsyncStoreClient.release()."""
        self._wait(self.release_async(lease_ids, refs, epoch=epoch))

    def release_async(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> Future[None]:
        return self._submit(lambda: self._core.release(lease_ids, refs, epoch=epoch))

    def reserve(self, count: int) -> int:
        """Asks for `count` credits beyond the target, for a burst; returns how many came."""
        return self._wait(self.reserve_async(count))

    def reserve_async(self, count: int) -> Future[int]:
        return self._submit(lambda: self._core.reserve(count))

    def close(self) -> None:
        """Gives back unused credits, ends the session and the thread. May be called again, by any thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback can't close its client")
        with self._lock:
            first, self._closed = not self._closed, True
            if self._loop is None or self._thread is None or self._pid != os.getpid():
                return
            if first:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_JOIN_SECONDS)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread. Everything that was submitted is answered before it ends."""
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._core.start()
        await self._stop.wait()
        await self._core.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _submit(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        unread: Callable[[T], None] | None = None,
        stops: bool = False,
    ) -> Future[T]:
        """Runs `call` in the client's loop, in the order of submission. `unread` gets the result of a call
        that was cancelled meanwhile. stops: cancelling ends the call."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed or self._loop is None or self._pid != os.getpid():
                why = "closed" if self._closed else "not started in this process"
                future.set_exception(UnavailableError(f"the client is {why}"))
                return future
            self._loop.call_soon_threadsafe(self._spawn, call, future, unread, stops)
        return future

    def _spawn(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        future: Future[T],
        unread: Callable[[T], None] | None,
        stops: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._answer(call, future, unread))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if stops:

            def stop(answered: Future[T]) -> None:
                if answered.cancelled() and not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)

            future.add_done_callback(stop)

    async def _answer(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        future: Future[T],
        unread: Callable[[T], None] | None,
    ) -> None:
        try:
            result = await call()
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        elif unread is not None:
            unread(result)

    def _wait(self, future: Future[T]) -> T:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback can't wait for an answer: use the *_async methods")
        return future.result()

    def _give_back(self, lease_ids: Sequence[int], refs: Sequence[SlotRef], epoch: int) -> None:
        """Releases what came for nobody."""
        if lease_ids or refs:
            self.release_async(lease_ids, refs, epoch=epoch)
