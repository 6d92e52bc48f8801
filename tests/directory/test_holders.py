"""Search: the end of every holder's part of a chain is found in a few looks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.directory.holders import PROBES, Search, probes


@given(start=st.integers(0, 5000), count=st.integers(0, 5000))
def test_probes_are_few_and_reach_both_ends(start: int, count: int) -> None:
    found = probes(start, start + count)
    assert found == sorted(set(found))
    assert len(found) == min(count, PROBES)
    if count:
        assert (found[0], found[-1]) == (start, start + count - 1)


@settings(deadline=None)
@given(
    keys=st.integers(1, 4096),
    live=st.lists(st.integers(0, 4096), max_size=5),
    dead=st.lists(st.integers(0, 4096), max_size=3),
)
def test_the_best_holder_is_first_with_all_that_it_has(keys: int, live: list[int], dead: list[int]) -> None:
    parts = {store: min(part, keys) for store, part in enumerate(live + dead)}
    addresses = {store: f"host-{store}" for store in range(len(live))}
    search, looks = Search(keys), 0
    while positions := search.next_look(addresses):
        looks += 1
        assert len(positions) <= PROBES
        search.found(positions, [[store for store, part in parts.items() if part > i] for i in positions])
    assert looks <= 3
    holders = search.holders(addresses, random.Random(0))
    assert {holder.store for holder in holders} == {s for s in addresses if parts[s]}
    assert [h.blocks for h in holders] == sorted((h.blocks for h in holders), reverse=True)
    if holders:
        assert holders[0].blocks == max(parts[store] for store in addresses)
    assert all(holder.blocks <= parts[holder.store] for holder in holders)
