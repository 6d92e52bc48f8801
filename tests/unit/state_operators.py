"""What operators do to a store, as rules of its state machine: eviction by hand, pins, and clearing."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvsieve_store.errors import NotFoundError
from kvsieve_store.state import Cleared, Evicted
from tests.unit.state_invariants import CheckedStoreModel
from tests.unit.state_model import KEYS, POOLS

names = st.sampled_from(sorted(POOLS))
few_keys = st.lists(st.sampled_from(KEYS), max_size=3)


class OperatorRules(CheckedStoreModel):
    """Each rule drives state and model, and compares the answers."""

    @rule(name=names, named=few_keys)
    def evict_keys(self, name: str, named: list[bytes]) -> None:
        if not named:
            return
        if name not in self.blocks:
            self.refuses(NotFoundError, lambda: self.state.evict(name, b"".join(named), 0, self.now))
            return
        known = set(named) & self.blocks[name].keys()
        going = {k for k in known if not self.subtree(name, k) & self.held_keys(name)}
        doomed = set().union(*(self.subtree(name, k) for k in going))
        unknown = sum(k not in self.blocks[name] for k in named)
        evicted = self.state.evict(name, b"".join(named), 0, self.now)
        assert evicted == Evicted(len(doomed), len(known - going), unknown)
        for k in doomed:
            del self.blocks[name][k]
        self.settle()

    @rule(name=names, count=st.integers(1, 3))
    def evict_coldest(self, name: str, count: int) -> None:
        if name not in self.blocks:
            return
        before = len(self.blocks[name])
        evicted = self.state.evict(name, b"", count, self.now)
        self.settle(evictions=True)
        assert evicted.evicted == before - len(self.blocks[name])
        assert evicted.evicted + evicted.skipped == min(count, before)
        assert evicted.skipped == 0 or not self.evictable(name)

    @rule(name=names, named=few_keys, set_pin=st.booleans())
    def pin_or_unpin(self, name: str, named: list[bytes], set_pin: bool) -> None:
        if name not in self.blocks or (set_pin and not named):
            return
        blocks = self.blocks[name]
        known = [blocks[k] for k in set(named) if k in blocks]
        if set_pin:
            assert self.state.pin(name, b"".join(named)).pinned == len(known)
        else:
            known = known if named else list(blocks.values())
            unpinned = self.state.unpin(name, b"".join(named)).unpinned
            assert unpinned == sum(block.pinned for block in known)
        for block in known:
            block.pinned = set_pin
        self.settle()

    @rule(name=st.sampled_from([*sorted(POOLS), ""]), really=st.sampled_from([False, False, True]))
    def clear(self, name: str, really: bool) -> None:
        """Not often: it leaves little to play with."""
        if not really or (name and name not in self.blocks):
            return
        dropped = skipped = 0
        for each in [name] if name else list(self.blocks):
            leased = self.leased(each)
            for k in list(self.blocks[each]):
                if k in leased:
                    skipped += 1
                else:
                    dropped += 1
                    del self.blocks[each][k]
            for block in self.blocks[each].values():
                block.parent = block.parent if block.parent in self.blocks[each] else b""
        assert self.state.clear(name) == Cleared(dropped, skipped)
        self.settle()
