"""Directory: tells other stores of this one's blocks, and finds theirs."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvsieve_store.client.backoff import Backoff
from kvsieve_store.directory.announcements import Announcements
from kvsieve_store.directory.holders import Holder, Search
from kvsieve_store.directory.table import Table, TableError, shown
from kvsieve_store.settings import StoreSettings

_log = logging.getLogger(__name__)

QUEUE_KEYS = 1 << 18
"""Most changes that wait for the directory: 8 MiB of keys."""

BATCH = 32
"""Changes of one round trip. The event loop, which serves engines, too, is busy with it for less than a
millisecond."""

STORE_SECONDS = 30
"""How long after its last word a store is taken to live, at most; it gives word three times as often."""

CALL_SECONDS = 5.0
LOOKUP_SECONDS = 0.5
"""For all that a request waits for; and for the look whether a directory that was lost is back."""

AVOID_SECONDS = 30.0
"""How long a store that could not be reached is not asked again."""

_STEADY_SECONDS = 60.0
_LINGER_SECONDS = 0.01
_LEAVE_SECONDS = 1.0

Walk = Callable[[], Iterator[tuple[bytes, bytes]]]
"""StoreState.walk."""


@dataclass
class DirectoryCounters:
    """Each only grows. announced, withdrawn: blocks. failures: calls of the directory. found, missing,
    failed: look-ups, by what came of them. stale: times that a holder had not what it was said to have, or
    was not reached."""

    announced: int = 0
    withdrawn: int = 0
    failures: int = 0
    found: int = 0
    missing: int = 0
    failed: int = 0
    stale: int = 0


@dataclass
class _Round:
    """A walk through all blocks, which says again that they are held.

    urgent: as fast as the directory takes it. due: when its next step is; ends: when the next round begins,
    at the soonest; seconds on the loop's clock.
    """

    parts: Iterator[tuple[bytes, bytes]] = field(default_factory=lambda: iter(()))
    urgent: bool = False
    due: float = 0.0
    ends: float = 0.0


class Directory:
    """Runs in the event loop's thread. Is state.Changes: what it is told there is only queued.

    Nothing here raises for want of the directory: without it nobody is found.

    name: its URL, without secrets. store: this store's number in it, another one each time that the process
    starts, so what is said of a dead store goes with it. address: what others reach this store at; empty
    while nothing is announced. down: why it can't be used; empty while it can. counters: what happened.
    """

    def __init__(self, settings: StoreSettings, rng: random.Random | None = None) -> None:
        """Raises SettingsError."""
        self.name = shown(settings.directory)
        self.store = secrets.randbits(63)
        self.address = ""
        self.down = ""
        self.counters = DirectoryCounters()
        self._table = Table(settings.directory)
        self._announces = bool(settings.peer_listen)
        self._ttl = settings.directory_ttl
        self._store_ttl = min(STORE_SECONDS, settings.directory_ttl)
        self._steps = settings.extents
        self._rng = rng or random.Random()
        self._backoff = Backoff(self._rng)
        self._queue = Announcements(QUEUE_KEYS)
        self._wake = asyncio.Event()
        self._walk: Walk = lambda: iter(())
        self._round = _Round()
        self._anew = False
        """An urgent round has to begin, once the queue is empty."""
        self._readable = True
        self._up_since = 0.0
        self._retry_at = 0.0
        self._next_beat = 0.0
        self._avoided: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def queued(self) -> int:
        """Changes that the directory has to be told of."""
        return len(self._queue)

    @property
    def overflowed(self) -> int:
        """Changes that there was no room for; only grows."""
        return self._queue.dropped

    # Announcing

    def sealed(self, family_id: bytes, keys: bytes) -> None:
        self._add(True, self.store, family_id, keys)

    def dropped(self, family_id: bytes, keys: bytes) -> None:
        self._add(False, self.store, family_id, keys)

    def start(self, address: str, walk: Walk) -> None:
        """address: what other stores reach this one at; empty: nothing is announced."""
        self.address = address
        self._walk = walk
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Says goodbye, if the directory listens: others need not try this store any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if self.address and not self.down:
                with suppress(TableError):
                    await self._table.leave(self.store, _LEAVE_SECONDS)
        await self._table.close()

    def _add(self, held: bool, store: int, family_id: bytes, keys: bytes) -> None:
        if not self._announces and store == self.store:
            return
        if not self._queue.add(held, store, family_id, keys):
            self._anew = True
        self._wake.set()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if self.down:
                    await asyncio.sleep(max(self._retry_at - clock(), 0.0))
                    await self._beat(LOOKUP_SECONDS)
                elif clock() >= self._next_beat:
                    await self._beat(CALL_SECONDS)
                elif self._walk_is_due(clock()):
                    self._walk_on(clock())
                elif self.queued:
                    await self._tell()
                else:
                    await self._rest(min(self._next_beat, self._round.due) - clock())
            except TableError as error:
                self._lost(error)
            except Exception as error:
                _log.exception("the directory's task failed")
                self._lost(TableError(repr(error)))

    async def _beat(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        known = await self._table.beat(self.store, self.address, self._store_ttl, seconds)
        self._next_beat = clock() + self._store_ttl / 3
        if self.address and (self.down or not known):
            # It has lost what it knew, or not heard what happened since.
            self._queue.clear()
            self._anew = True
        if self.down:
            self.down, self._readable, self._up_since = "", True, clock()
            _log.warning("directory %s: is back; announcing all blocks anew", self.name)

    async def _tell(self) -> None:
        changes = self._queue.first(BATCH)
        await self._table.tell(changes, self._ttl, CALL_SECONDS)
        self._queue.done(len(changes))
        announced = sum(change.held for change in changes)
        self.counters.announced += announced
        self.counters.withdrawn += len(changes) - announced
        await asyncio.sleep(0)

    def _walk_is_due(self, now: float) -> bool:
        if not self.address:
            return False
        if self.queued:
            calm = not self._anew and not self._round.urgent and self.queued < QUEUE_KEYS // 2
            return calm and now >= self._round.due
        return self._anew or self._round.urgent or now >= self._round.due

    def _walk_on(self, now: float) -> None:
        """The next extent's blocks. A round takes a third of the time for which a block is known."""
        whole = self._ttl / 3
        if self._anew:
            self._anew, self._round = False, _Round(self._walk(), urgent=True, ends=now + whole)
        part = next(self._round.parts, None)
        if part is None:
            due = max(self._round.ends, now)
            self._round = _Round(self._walk(), due=due, ends=due + whole)
        else:
            self._queue.add(True, self.store, *part)
            self._round.due = now + whole / self._steps

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake.wait()
            await asyncio.sleep(_LINGER_SECONDS)  # more seals come together

    def _lost(self, error: TableError) -> None:
        now = asyncio.get_running_loop().time()
        self.counters.failures += 1
        if not self.down:
            _log.warning(
                "directory %s: can't be used (%s); only this store's own blocks are found until it is back",
                self.name,
                error,
            )
            if now - self._up_since > _STEADY_SECONDS:
                self._backoff.reset()
        self.down, self._readable = str(error), error.readable
        self._retry_at = now + self._backoff.wait()
        self._wake.set()

    # Finding

    async def locate(self, family_id: bytes, keys: Sequence[bytes]) -> list[Holder]:
        """Other stores that have blocks of a chain of keys, from the first on; who has the most first."""
        if self.down and not self._readable:
            self.counters.failed += 1
            return []
        try:
            holders = await self._search(family_id, keys)
        except TableError as error:
            self._lost(error)
            self.counters.failed += 1
            return []
        self.counters.found += bool(holders)
        self.counters.missing += not holders
        return holders

    def has_not(self, holder: Holder, family_id: bytes, keys: Sequence[bytes]) -> None:
        """A holder turned out not to have these; the directory is told."""
        self.counters.stale += 1
        self._add(False, holder.store, family_id, b"".join(keys))

    def avoid(self, holder: Holder) -> None:
        """A holder could not be reached: it is not asked for a while. If it is dead, it has left by then."""
        self.counters.stale += 1
        now = asyncio.get_running_loop().time()
        self._avoided = {store: until for store, until in self._avoided.items() if until > now}
        self._avoided[holder.store] = now + AVOID_SECONDS

    async def _search(self, family_id: bytes, keys: Sequence[bytes]) -> list[Holder]:
        clock = asyncio.get_running_loop().time
        deadline = clock() + LOOKUP_SECONDS
        search = Search(len(keys))
        addresses: dict[int, str] = {}
        while positions := search.next_look(addresses):
            there = await self._table.holders(family_id, [keys[i] for i in positions], deadline - clock())
            search.found(positions, there)
            unknown = [store for store in search.seen if store not in addresses and store != self.store]
            for store, address in zip(
                unknown, await self._addresses(unknown, deadline - clock()), strict=True
            ):
                if not address:
                    gone = b"".join(keys[i] for i in search.seen.pop(store))
                    self._add(False, store, family_id, gone)
                elif address != self.address and self._avoided.get(store, 0.0) <= clock():
                    addresses[store] = address
        return search.holders(addresses, self._rng)

    async def _addresses(self, stores: Sequence[int], seconds: float) -> list[str]:
        return await self._table.addresses(stores, seconds) if stores else []
