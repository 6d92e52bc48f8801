"""What holds in a StoreState after every step, whatever the step was."""

from __future__ import annotations

import numpy as np
from hypothesis.stateful import invariant

from kvsieve_store.state.slots import FREE, SEALED, WRITING
from tests.unit.state_model import EXTENTS, KEYS, QUOTAS, StoreModel


class CheckedStoreModel(StoreModel):
    """Compares the state's public answers, and its tables, with the model."""

    @invariant()
    def blocks_are_the_models(self) -> None:
        for name, blocks in self.blocks.items():
            leases = [
                lease.keys for lease in self.leases.values() if self.sessions[lease.session].pool == name
            ]
            rows = {row.key: row for row in self.state.list_blocks(name, 1000, "").blocks}
            assert rows.keys() == blocks.keys()
            for k, block in blocks.items():
                row = rows[k]
                assert (row.slot, row.generation) == (block.slot, block.generation)
                assert (row.parent, row.pinned) == (block.parent, block.pinned)
                assert row.children == len(self.children(name, k))
                assert row.leases == sum(k in each for each in leases) + (k in self.handoffs[name])

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        owners: dict[int, str] = {}
        for name in self.blocks:
            pool = self.pool(name)
            table = pool.table
            holders = {s: m for s, m in self.sessions.items() if m.pool == name}
            held = {slot: s for s, m in holders.items() for slot in m.held}
            sealed = {block.slot for block in self.blocks[name].values()}
            free = pool._free.view().tolist()
            leaving = self.leaving[name]
            owned = {slot for extent in pool.extents for slot in self.slots_of(name, extent)}
            assert len(free) == len(set(free)) == pool.free
            assert (pool.writing, pool.sealed) == (len(held) + len(leaving), len(sealed))
            assert pool.leaving == len(leaving)
            assert pool.free + pool.writing + pool.sealed == pool.owned == len(owned)
            for slot in range(len(table)):
                places = {
                    FREE: slot in free,
                    WRITING: slot in held or slot in leaving,
                    SEALED: slot in sealed,
                }
                assert sum(places.values()) == (slot in owned)
                assert places.get(int(table.state[slot]), slot not in owned)
                ordinal = self.state._sessions.find(held[slot]).ordinal if slot in held else 0
                assert table.owner[slot] == ordinal
                assert slot not in held or table.generation[slot] == holders[held[slot]].held[slot]
                columns = (table.parent, table.children, table.visited, table.pinned)
                assert slot in sealed or not any(column[slot] for column in columns)
                leases = sum(
                    slot in lease.slots
                    for lease in self.leases.values()
                    if self.sessions[lease.session].pool == name
                )
                assert slot in sealed or table.leases[slot] == leases
            for extent in pool.extents:
                assert owners.setdefault(extent, name) == name
            assert len(pool.extents) <= QUOTAS[name]
        assert self.state._extents.free == EXTENTS - len(owners)

    @invariant()
    def what_is_announced_is_being_written_by_a_session_that_is_there(self) -> None:
        for name, announced in self.announced.items():
            pool = self.pool(name)
            rows = [np.frombuffer(k, np.uint64).reshape(1, 4) for k in KEYS]
            found = [pool.announced.find_prefix(row, 1) for row in rows]
            assert found == [[announced[k]] if k in announced else [] for k in KEYS]
            assert sorted(pool.announced.slots()) == sorted(announced.values())
            held = {s for m in self.sessions.values() if m.pool == name and not m.ended for s in m.held}
            assert held.issuperset(announced.values())
            assert not announced.keys() & self.blocks[name].keys()

    @invariant()
    def what_is_held_was_announced_by_a_session_that_is_there(self) -> None:
        for name, held in self.handoffs.items():
            assert len(self.pool(name).handoffs) == len(held)
            assert held.keys() <= self.blocks[name].keys()
            assert all(session_id in self.live() for session_id, _ in held.values())

    @invariant()
    def index_and_order_agree_with_the_table(self) -> None:
        for name, blocks in self.blocks.items():
            pool = self.pool(name)
            assert len(pool.index) == len(pool.sieve) == len(blocks)
            found = pool.index.find(np.frombuffer(b"".join(KEYS), np.uint64).reshape(-1, 4)).tolist()
            assert found == [blocks[k].slot if k in blocks else -1 for k in KEYS]
            order = pool.sieve.slots().tolist()
            assert sorted(order) == sorted(block.slot for block in blocks.values())
            rank = {slot: i for i, slot in enumerate(order)}
            for block in blocks.values():
                assert not block.parent or rank[blocks[block.parent].slot] < rank[block.slot]

    @invariant()
    def changes_tell_all_there_is(self) -> None:
        sealed = {(self.pool(name).pool_id, k) for name, blocks in self.blocks.items() for k in blocks}
        assert self.told.keys == sealed
        walked = [
            (pool_id, keys[i : i + 32])
            for pool_id, keys in self.state.walk()
            for i in range(0, len(keys), 32)
        ]
        assert len(walked) == len(sealed) == len(set(walked) & sealed)

    @invariant()
    def generations_only_grow(self) -> None:
        """Per place in the arena, whichever pool owns it."""
        for name in self.blocks:
            pool = self.pool(name)
            for extent in pool.extents:
                for slot in self.slots_of(name, extent):
                    where = (pool.layout, pool.layout.slot_address(slot))
                    generation = int(pool.table.generation[slot])
                    assert generation >= self.generations.get(where, 0)
                    self.generations[where] = generation

    @invariant()
    def listings_and_totals_agree(self) -> None:
        totals = self.state.totals()
        rows = self.state.list_pools()
        assert totals.pools == len(rows) == len(self.blocks)
        assert (
            totals.sealed_blocks == sum(map(len, self.blocks.values())) == sum(r.sealed_blocks for r in rows)
        )
        assert totals.owned_bytes == sum(row.owned_bytes for row in rows)
        assert totals.leases == len(self.leases)
        assert totals.held_blocks == sum(map(len, self.handoffs.values()))
        assert totals.sessions == len(self.live())
        assert totals.sessions + totals.fencing_sessions == len(self.sessions)
        listed = [(row.pool, row.held_slots, row.leases) for row in self.state.list_sessions(self.now)]
        assert listed == [(m.pool, len(m.held), len(m.leases)) for m in self.sessions.values()]
