"""KeyIndex against a dict, with keys that are random, and keys made to collide."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.state.index import LANES, KeyIndex

SLOTS = 40


class IndexAndModel:
    """An index, and the dict that it must agree with."""

    def __init__(self, capacity: int = SLOTS, slots: int = SLOTS) -> None:
        self.keys = np.zeros((slots, 4), np.uint64)
        self.index = KeyIndex(self.keys, capacity)
        self.model: dict[bytes, int] = {}

    def insert(self, entries: dict[bytes, int]) -> None:
        slots = np.array(list(entries.values()), np.intp)
        keys = as_array(list(entries))
        self.keys[slots] = keys
        self.index.insert(keys, slots)
        self.model |= entries

    def remove(self, keys: list[bytes]) -> None:
        self.index.remove(np.array([self.model.pop(key) for key in keys], np.intp))

    def check(self, asked: list[bytes]) -> None:
        found = self.index.find(as_array(asked)).tolist()
        assert found == [self.model.get(key, -1) for key in asked]
        assert len(self.index) == len(self.model)


def as_array(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)


def random_key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def colliding_key(number: int) -> bytes:
    """Same buckets and same tag as all others; they differ only in the last word."""
    return np.array([7, 7, 7, number], np.uint64).tobytes()


def same_tag_key(number: int) -> bytes:
    """Few buckets, few tags: much is compared in vain."""
    return np.array([number % 3, number % 2, number % 2, number], np.uint64).tobytes()


@pytest.mark.parametrize("make_key", [random_key, colliding_key, same_tag_key])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_agrees_with_a_dict(make_key, data) -> None:
    """Batches in and out, at any load up to full."""
    both = IndexAndModel()
    everything = [make_key(number) for number in range(2 * SLOTS)]
    for _ in range(data.draw(st.integers(1, 5))):
        absent = [key for key in everything if key not in both.model]
        free = [slot for slot in range(SLOTS) if slot not in both.model.values()]
        new = data.draw(st.lists(st.sampled_from(absent), max_size=len(free), unique=True))
        both.insert(dict(zip(new, free, strict=False)))
        if both.model:
            both.remove(data.draw(st.lists(st.sampled_from(sorted(both.model)), unique=True)))
        both.check(everything)


def test_collisions_in_both_buckets_overflow_and_come_back() -> None:
    """More keys than both buckets hold stay findable, while they come and after some went."""
    both = IndexAndModel()
    keys = [colliding_key(number) for number in range(4 * LANES)]
    both.insert({key: slot for slot, key in enumerate(keys)})
    both.check(keys)
    both.remove(keys[::2])
    both.check(keys)
    both.insert({key: slot for slot, key in enumerate(keys) if slot % 2 == 0})
    both.check(keys)


def test_a_slot_that_is_reused_forgets_the_old_key() -> None:
    both = IndexAndModel()
    old, new = random_key(1), random_key(2)
    both.insert({old: 5})
    both.remove([old])
    both.insert({new: 5})
    both.check([old, new])


def test_nothing_asked_nothing_found() -> None:
    both = IndexAndModel()
    both.check([random_key(1)])
    assert both.index.find(np.zeros((0, 4), np.uint64)).tolist() == []


def test_random_keys_do_not_overflow_when_full() -> None:
    """Two choices keep the dict empty for keys that are hashes."""
    both = IndexAndModel(capacity=20_000, slots=20_000)
    keys = [random_key(number) for number in range(20_000)]
    both.insert({key: slot for slot, key in enumerate(keys)})
    both.check(keys)
    assert len(both.index._overflow) < 20
