"""Pool: all blocks of one model fingerprint; slots from free to sealed and back."""

from __future__ import annotations

import numpy as np

from kvsieve_store.errors import SlotNotHeldError
from kvsieve_store.protocol.layout import ExtentLayout
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.state.announced import Announced
from kvsieve_store.state.arrays import BoolArray, I32Array, KeyArray, SlotArray, U8Array, U32Array, as_slots
from kvsieve_store.state.changes import Changes
from kvsieve_store.state.handoffs import Handoffs
from kvsieve_store.state.index import KeyIndex
from kvsieve_store.state.protection import Protection
from kvsieve_store.state.results import Counters, Grant
from kvsieve_store.state.sieve import Sieve
from kvsieve_store.state.slots import FREE, SEALED, UNOWNED, WRITING, FreeSlots, SlotTable

SEAL_SEALED = 1
SEAL_DUPLICATE = 2

_MATCH_STEP = 2048


class Pool:
    """Owns extents of the arena, and every slot in them.

    Who asks (sessions, limits, time) is the store's part; a method here expects checked arguments.

    spec, layout: the fingerprint, and where its slots lie. extents: extent numbers that the pool owns.
    quota: most extents that it may own. attached, fencing: sessions in each state. last_used: seconds.
    announced: keys of writing slots. handoffs: sealed blocks that were, and are held.
    writing: slots in that state; leaving: of these, given back but leased.
    refilling: the tick is evicting up to the high watermark. changes: told of blocks that come and go.
    """

    def __init__(
        self,
        spec: PoolSpec,
        layout: ExtentLayout,
        arena_extents: int,
        quota: int,
        now: float,
        changes: Changes | None = None,
    ) -> None:
        slots = arena_extents * layout.slots_per_extent
        self.spec = spec
        self.pool_id = spec.pool_id()
        self.family_id = spec.family_id()
        self.layout = layout
        self.quota = quota
        self.extents: list[int] = []
        self.table = SlotTable(slots)
        self.index = KeyIndex(self.table.key, quota * layout.slots_per_extent)
        self.sieve = Sieve(self.table)
        self.protection = Protection(self.table, layout.slots_per_extent)
        self.counters = Counters()
        self.announced = Announced()
        self.handoffs = Handoffs()
        self.writing = 0
        self.leaving = 0
        self.attached = 0
        self.fencing = 0
        self.last_used = now
        self.refilling = False
        self._changes = changes
        self._free = FreeSlots(slots)

    @property
    def free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def sealed(self) -> int:
        """Sealed blocks."""
        return len(self.sieve)

    @property
    def owned(self) -> int:
        """Slots in the pool's extents."""
        return len(self.extents) * self.layout.slots_per_extent

    @property
    def idle(self) -> bool:
        """No sessions, not even ended ones, and no blocks: nothing would be lost with the pool."""
        return not (self.attached or self.fencing or self.sealed)

    def extent_slots(self, extent: int) -> slice:
        """The slots of an extent."""
        per_extent = self.layout.slots_per_extent
        return slice(extent * per_extent, (extent + 1) * per_extent)

    def add_extent(self, extent: int, floor: int) -> None:
        """Takes over an extent; generations of its slots go on from `floor` at least."""
        part = self.extent_slots(extent)
        self.table.state[part] = FREE
        np.maximum(self.table.generation[part], floor, out=self.table.generation[part])
        self._free.push(np.arange(part.start, part.stop))
        self.extents.append(extent)

    def remove_extent(self, extent: int) -> int:
        """Gives up an extent without writing slots, drops its blocks; returns its highest generation."""
        part = self.extent_slots(extent)
        self.drop(np.flatnonzero(self.table.state[part] == SEALED) + part.start)
        free = int(np.count_nonzero(self.table.state[part] == FREE))
        self._free.remove_range(part.start, part.stop, free)
        self.table.state[part] = UNOWNED
        self.extents.remove(extent)
        return int(self.table.generation[part].max())

    def disband(self) -> tuple[SlotArray, U32Array]:
        """Gives up all extents of a pool that is idle; returns them, and the highest generation of each."""
        extents = np.array(self.extents, np.intp)
        rows = (-1, self.layout.slots_per_extent)
        self.table.state.reshape(rows)[extents] = UNOWNED
        self._free.clear()
        self.extents.clear()
        return extents, self.table.generation.reshape(rows)[extents].max(axis=1)

    def grant(self, ordinal: int, count: int) -> Grant:
        """Hands up to `count` free slots to a session: free -> writing, under a new generation."""
        slots = self._free.pop(min(count, self.free))
        table = self.table
        table.generation[slots] += 1
        table.state[slots] = WRITING
        table.owner[slots] = ordinal
        self.writing += len(slots)
        self.counters.granted_slots += len(slots)
        return Grant(slots.astype(np.uint32), table.generation[slots])

    def check_held(self, ordinal: int, slots: U32Array, generations: U32Array) -> SlotArray:
        """The slots as indices. Raises SlotNotHeldError, which names the first entry that is not held."""
        table = self.table
        at = as_slots(slots)
        inside = np.where(at < len(table), at, 0)
        held = (at < len(table)) & (table.state[inside] == WRITING) & (table.owner[inside] == ordinal)
        good = held & (table.generation[inside] == generations)
        if not good.all():
            i = int(np.argmin(good))
            if not held[i]:
                raise SlotNotHeldError(f"slots[{i}]: slot {slots[i]} is not held by this session")
            raise SlotNotHeldError(
                f"generations[{i}]: slot {slots[i]} is held under generation {table.generation[at[i]]}, "
                f"{generations[i]} given"
            )
        if len(set(at.tolist())) != len(at):
            _, first = np.unique(at, return_index=True)
            i = int(np.setdiff1d(np.arange(len(at)), first)[0])
            raise SlotNotHeldError(f"slots[{i}]: slot {slots[i]} is given twice")
        return at

    def fresh(self, keys: KeyArray) -> BoolArray:
        """Marks the keys that are not there yet, each once."""
        return (self.index.find(keys) < 0) & _first_of_each(keys)

    def seal(
        self, keys: KeyArray, parents: KeyArray, slots: SlotArray, fresh: BoolArray, now: float
    ) -> U8Array:
        """Writing -> sealed where the key is fresh(); a duplicate's slot stays as it is, to be given back.
        Returns a SealStatus per entry. now: seconds, from which on a block is held that was announced so.

        A parent counts only if it was sealed before, in this batch or earlier; so no block is its own
        ancestor, and parents are older than their children. Any other block is the first of its chain.
        """
        new, table = slots[fresh], self.table
        if self.announced:
            for row, slot, hold in self.announced.holds(keys[fresh]):
                # Somebody is about to come for them: where all is in use they would be the first to go.
                table.visited[new[row]] = 1
                if hold:
                    table.leases[new[row]] += 1
                    self.handoffs.add(int(new[row]), int(table.owner[slot]), now + hold)
            self.announced.drop_keys(keys[fresh])
            self.announced.drop_slots(new.tolist())
        table.key[new] = keys[fresh]
        table.state[new] = SEALED
        table.owner[new] = 0
        self.index.insert(keys[fresh], new)
        self.sieve.append(new)
        self._link(new, parents[fresh])
        self.writing -= len(new)
        self.counters.sealed_blocks += len(new)
        self.counters.duplicate_blocks += len(slots) - len(new)
        if self._changes is not None and len(new):
            self._changes.sealed(self.family_id, keys[fresh].tobytes())
        return np.where(fresh, SEAL_SEALED, SEAL_DUPLICATE).astype(np.uint8)

    def _link(self, new: SlotArray, parents: KeyArray) -> None:
        table = self.table
        chained = np.flatnonzero(parents.any(axis=1))
        above = self.index.find(parents[chained])
        older = (above >= 0) & (table.position[above] < table.position[new[chained]])
        above, below = above[older], new[chained[older]]
        table.parent[below] = above + 1
        np.add.at(table.children, above, 1)

    def give_back(self, slots: SlotArray) -> None:
        """Writing -> free, unsealed. A slot that is leased while it is written goes with its last lease."""
        if self.announced:
            self.announced.drop_slots(slots.tolist())
        leased = self.table.leases[slots] > 0
        if leased.any():
            self.table.owner[slots[leased]] = 0
            self.leaving += int(np.count_nonzero(leased))
            slots = slots[~leased]
        self._free_written(slots)

    def _free_written(self, slots: SlotArray) -> None:
        self.table.free(slots)
        self._free.push(slots)
        self.writing -= len(slots)

    def announce(self, keys: KeyArray, slots: SlotArray, hold: float) -> None:
        """Says which keys writing slots will have; sealed keys are skipped. hold: seconds that the blocks
        stay, once sealed, unless taken() ends it."""
        new = self.index.find(keys) < 0
        self.announced.add(keys[new], slots[new], hold)

    def withdraw(self, ordinal: int) -> None:
        """Forgets what a session has announced, and ends the holds that came of it."""
        owner = self.table.owner
        self.announced.drop_slots([slot for slot in self.announced.slots() if owner[slot] == ordinal])
        self.unlease(self.handoffs.take_of(ordinal))

    def taken(self, keys: KeyArray) -> None:
        """Ends the holds of these blocks; others are skipped."""
        slots = self.index.find(keys)
        self.unlease(self.handoffs.take(slots[slots >= 0].tolist()))

    def progress(self, keys: KeyArray, slots: SlotArray) -> tuple[int, int]:
        """Of leased slots, and the keys that were announced for them: how many, from the first on, are sealed
        under theirs; how many are so or may still be."""
        sealed = self.index.find(keys) == slots
        there = [
            bool(done) or self.announced.find_prefix(keys[i : i + 1], 1) == [slot]
            for i, (done, slot) in enumerate(zip(sealed, slots.tolist(), strict=True))
        ]
        return _prefix(sealed.tolist()), _prefix(there)

    def held_by(self, ordinal: int) -> SlotArray:
        """Writing slots of a session."""
        parts = [self.extent_slots(extent) for extent in self.extents]
        found = [np.flatnonzero(self.table.owner[part] == ordinal) + part.start for part in parts]
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    def find_prefix(self, keys: KeyArray) -> SlotArray:
        """Slots of the longest sealed prefix of `keys`; changes nothing."""
        found: list[SlotArray] = []
        for start in range(0, len(keys), _MATCH_STEP):
            slots = self.index.find(keys[start : start + _MATCH_STEP])
            missing = slots < 0
            end = int(missing.argmax()) if missing.any() else len(slots)
            found.append(slots[:end])
            if end < len(slots):
                break
        return found[0] if len(found) == 1 else np.concatenate(found)

    def sealed_keys(self, extent: int) -> KeyArray:
        """Keys of an extent's sealed blocks; none when it is not the pool's."""
        part = self.extent_slots(extent)
        keys: KeyArray = self.table.key[part][self.table.state[part] == SEALED]
        return keys

    def visit(self, prefix: SlotArray, asked: int) -> None:
        """Marks what find_prefix() found as visited, and counts it. asked: keys looked for."""
        self.table.visited[prefix] = 1
        self.counters.matched_blocks += len(prefix)
        self.counters.missed_blocks += asked - len(prefix)

    def lease(self, slots: I32Array) -> None:
        """Counts a lease on each slot; they must differ. Sealed ones, or announced ones while they are
        written."""
        self.table.leases[slots] += 1

    def unlease(self, slots: I32Array) -> None:
        """Undoes lease() of the same slots."""
        if not len(slots):
            return
        table = self.table
        table.leases[slots] -= 1
        self.sieve.retry()
        if self.leaving:
            over = (table.state[slots] == WRITING) & (table.owner[slots] == 0) & (table.leases[slots] == 0)
            self.leaving -= int(np.count_nonzero(over))
            self._free_written(slots[over].astype(np.intp))

    def unpin(self, slots: SlotArray) -> None:
        """Takes the pins of blocks away."""
        self.protection.unpin(slots)
        self.sieve.retry()

    def evict(self, count: int) -> int:
        """Frees up to `count` of the coldest blocks that can go; returns how many went."""
        slots = self.sieve.evict(count)
        self._forget(slots)
        self.counters.evicted_blocks += len(slots)
        return len(slots)

    def drop(self, slots: SlotArray) -> None:
        """Frees named blocks, which must be sealed and not leased. Children that stay become orphans."""
        if not len(slots):
            return
        self.protection.drop(slots)
        table = self.table
        going = np.zeros(len(table), np.bool_)
        going[slots] = True
        blocks = self.sieve.slots()
        blocks = blocks[table.parent[blocks] > 0]
        orphans = blocks[going[table.parent[blocks] - 1] & ~going[blocks]]
        table.parent[orphans] = 0
        above = table.parent[slots]
        np.subtract.at(table.children, above[above > 0] - 1, 1)
        self.sieve.remove(slots)
        self._forget(slots)

    def _forget(self, slots: SlotArray) -> None:
        if self._changes is not None and len(slots):
            self._changes.dropped(self.family_id, self.table.key[slots].tobytes())
        self.index.remove(slots)
        self.table.free(slots)
        self._free.push(slots)


def _prefix(marks: list[bool]) -> int:
    """How many are set before the first that is not."""
    return marks.index(False) if False in marks else len(marks)


def _first_of_each(keys: KeyArray) -> BoolArray:
    """Marks the first entry of each key."""
    if len(set(keys[:, 0].tolist())) == len(keys):
        return np.ones(len(keys), np.bool_)
    first = np.zeros(len(keys), np.bool_)
    seen: set[bytes] = set()
    for i in range(len(keys)):
        key = keys[i].tobytes()
        first[i] = key not in seen
        seen.add(key)
    return first
