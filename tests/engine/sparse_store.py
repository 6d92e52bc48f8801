"""A store in a few lines, with clients whose answers come when the test says so.

Like the real one, it evicts what nobody leases, and tops credits up within a quarter of its slots.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvsieve_store.client import Attachment, Fetch, Held, Match, SealEntry, SealResult, SlotRef
from kvsieve_store.errors import UnavailableError


class FakeStore:
    """arena: what each slot holds. Slots are free, granted (a client's), or sealed."""

    def __init__(self, slots: int, rng: random.Random | None = None) -> None:
        self.slots = slots
        self.rng = rng or random.Random(0)
        self.arena: dict[int, Any] = {}
        self.free = list(range(slots))
        self.granted: dict[int, FakeClient] = {}
        self.sealed: dict[bytes, int] = {}
        self.leases: dict[int, list[int]] = {}
        self.clients: list[FakeClient] = []
        self._next_lease = 1

    def grant(self, client: FakeClient, count: int) -> list[SlotRef]:
        leased = {slot for slots in self.leases.values() for slot in slots}
        loose = [key for key, slot in self.sealed.items() if slot not in leased]
        while len(self.free) < count and loose:
            self.free.append(self.sealed.pop(loose.pop(self.rng.randrange(len(loose)))))
        taken, self.free = self.free[:count], self.free[count:]
        for slot in taken:
            self.granted[slot] = client
            self.arena[slot] = "garbage"
        return [SlotRef(slot, 1) for slot in taken]

    def top_up(self, client: FakeClient) -> list[SlotRef]:
        """What the client lacks to its target. Slots that it writes to count as its own."""
        held = sum(owner is client for owner in self.granted.values())
        target = min(client.target, max(1, self.slots // (4 * len(self.clients))))
        return self.grant(client, max(target - held, 0))

    def lease(self, slots: Sequence[int], lease: int = 0) -> tuple[int, ...]:
        """Added to the lease, if it is there."""
        if not slots:
            return ()
        if lease in self.leases:
            self.leases[lease] += slots
            return (lease,)
        self._next_lease += 1
        self.leases[self._next_lease] = list(slots)
        return (self._next_lease,)

    def give_back(self, client: FakeClient, leases: Sequence[int], refs: Sequence[SlotRef]) -> None:
        """Leases that are gone already are skipped."""
        for lease in leases:
            self.leases.pop(lease, None)
        for ref in refs:
            assert self.granted.pop(ref.slot) is client, "a slot that is not the session's"
            self.free.append(ref.slot)


class FakeClient:
    """StoreClient's verbs. Calls are answered in order, in tick()."""

    def __init__(self, store: FakeStore, target: int) -> None:
        self.store, self.target = store, target
        self.epoch = 0
        self.attachment: Attachment | None = None
        self._slots: list[SlotRef] = []
        self.calls: deque[tuple[Callable[[], Any], Future[Any], int]] = deque()
        self.attach(store)

    def attach(self, store: FakeStore) -> None:
        """Another session, on that store."""
        self.store = store
        self.epoch += 1
        self.attachment = Attachment(
            epoch=self.epoch,
            instance=b"store%d" % id(store),
            pool_id=bytes(32),
            extent_bytes=4096,
            segments=(("/arena", 4096 * store.slots),),
            slot_bytes=4096,
            slots_per_extent=1,
            slots_offset=0,
            lock_path="",
            store_version="0",
        )
        store.clients.append(self)
        self._slots = store.top_up(self)

    def lose(self) -> None:
        """The session is over; calls that were not answered fail."""
        self.attachment, self._slots = None, []
        while self.calls:
            if (future := self.calls.popleft()[1]).set_running_or_notify_cancel():
                future.set_exception(UnavailableError("lost"))

    @property
    def credits(self) -> int:
        return len(self._slots)

    def take_credits(self, count: int, *, epoch: int | None = None) -> list[SlotRef]:
        if self.attachment is None or epoch not in (None, self.epoch):
            return []
        taken, self._slots = self._slots[:count], self._slots[count:]
        return taken

    def match_async(self, keys: Sequence[bytes], *, fetch: Fetch | None = None) -> Future[Match]:
        def answer() -> Match:
            slots = []
            for key in keys:
                if key not in self.store.sealed:
                    break
                slots.append(self.store.sealed[key])
            return Match(tuple(SlotRef(s, 1) for s in slots), self.store.lease(slots), self.epoch)

        return self._call(answer)

    def seal_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold: bool = False, lease: int = 0
    ) -> Any:
        def answer() -> Any:
            results, fresh = [], []
            for key, _, ref in entries:
                assert self.store.granted[ref.slot] is self
                new = key not in self.store.sealed
                results.append(SealResult.SEALED if new else SealResult.DUPLICATE)
                if new:
                    del self.store.granted[ref.slot]
                    self.store.sealed[key] = ref.slot
                    fresh.append(ref.slot)
                elif not hold:
                    self.store.give_back(self, (), [ref])
            leases = self.store.lease(fresh, lease) if hold else ()
            self._slots += self.store.top_up(self)
            return Held(results, leases, self.epoch) if hold else results

        return self._call(answer, epoch)

    def reserve_async(self, count: int) -> Future[int]:
        def answer() -> int:
            refs = self.store.grant(self, count)
            self._slots += refs
            return len(refs)

        return self._call(answer)

    def release_async(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> Future[None]:
        return self._call(lambda: self.store.give_back(self, lease_ids, refs), epoch)

    def tick(self, count: int = 1 << 30) -> None:
        """Answers `count` calls at most; now and then, the store tops up."""
        if self.attachment is not None and self.store.rng.random() < 0.05:
            self._slots += self.store.top_up(self)
        for _ in range(min(count, len(self.calls))):
            call, future, epoch = self.calls.popleft()
            if self.attachment is None or epoch != self.epoch:
                future.set_exception(UnavailableError("over"))
                continue
            result = call()
            if future.cancelled():
                if isinstance(result, Match):
                    self.store.give_back(self, result.lease_ids, ())
            else:
                future.set_result(result)

    def _call(self, answer: Callable[[], Any], epoch: int | None = None) -> Any:
        future: Future[Any] = Future()
        if self.attachment is None:
            future.set_exception(UnavailableError("no session"))
        else:
            self.calls.append((answer, future, epoch if epoch is not None else self.epoch))
        return future
