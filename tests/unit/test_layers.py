"""LayerOrder against a slot whose bytes are marked one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.protocol.layers import LayerOrder
from kvsieve_store.protocol.layout import MAX_WRITERS, SlotLayout
from kvsieve_store.protocol.spec import Plane, PoolSpec

sizes = st.lists(st.integers(1, 700), min_size=1, max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> PoolSpec:
    ranks = draw(st.integers(1, 4))
    planes = draw(st.lists(st.tuples(sizes, st.sampled_from([1, ranks])), min_size=1, max_size=3))
    made = tuple(Plane(f"p{i}", layers, shards) for i, (layers, shards) in enumerate(planes))
    return PoolSpec("pool", "m", "bfloat16", 16, "sha256", "", "x", ranks, made)


def layers_of(spec: PoolSpec) -> list[tuple[int, int]]:
    """Plane and layer, in the order of writing."""
    return [(p, layer) for p, plane in enumerate(spec.planes) for layer in range(len(plane.layer_bytes))]


def there(spec: PoolSpec, layers: int) -> np.ndarray:
    """Which bytes of a slot the first layers have, all shards."""
    layout = SlotLayout.of(spec)
    marks = np.zeros(layout.slot_bytes, np.bool_)
    for p, layer in layers_of(spec)[:layers]:
        for shard in layout.layer_offsets[p]:
            marks[shard[layer] : shard[layer] + spec.planes[p].layer_bytes[layer]] = True
    return marks if layers <= len(layers_of(spec)) else np.ones_like(marks)


@settings(deadline=None)
@given(specs(), st.data())
def test_what_is_read_between_two_counts_is_what_came_and_is_allowed(
    spec: PoolSpec, data: st.DataObject
) -> None:
    order = LayerOrder.of(spec)
    assert order is not None
    assert order.sealed == len(layers_of(spec)) + 1
    first = data.draw(st.integers(0, order.sealed))
    last = data.draw(st.integers(first, order.sealed))
    marks = there(spec, first).astype(np.int64)
    ranges = order.between(first, last)
    for offset, size in ranges.tolist():
        marks[offset : offset + size] += 1
    assert (marks == there(spec, last)).all()
    assert order.allows(np.full(len(ranges), last), ranges[:, 0], ranges[:, 1]).all()
    whole = there(spec, last)
    assert order.prefix(last) == (len(whole) if whole.all() else int(np.argmin(whole)))
    at = data.draw(st.integers(0, order.slot_bytes - 1))
    size = data.draw(st.integers(1, order.slot_bytes - at))
    allowed = order.allows(np.array([last]), np.array([at], np.uint64), np.array([size], np.uint64))
    assert not allowed[0] or whole[at : at + size].all()


@settings(deadline=None)
@given(specs(), st.data())
def test_a_layer_counts_once_every_shard_has_written_it(spec: PoolSpec, data: st.DataObject) -> None:
    order = LayerOrder.of(spec)
    assert order is not None
    words = np.zeros((1, MAX_WRITERS), np.uint16)
    written = set()
    for rank in range(spec.tp_size):
        mine = [(p, n) for p, n in layers_of(spec) if rank == 0 or spec.planes[p].shards > 1]
        words[0, rank] = done = data.draw(st.integers(0, len(mine)))
        written |= {(p, n, rank) for p, n in mine[:done]}
    complete = 0
    for p, layer in layers_of(spec):
        if any((p, layer, shard) not in written for shard in range(spec.planes[p].shards)):
            break
        complete += 1
    assert order.complete(words).tolist() == [complete]


def test_words_that_say_too_much_make_no_block_sealed() -> None:
    spec = PoolSpec("p", "m", "d", 16, "h", "", "x", 2, (Plane("main", (64,) * 3, 2), Plane("other", (8,))))
    order = LayerOrder.of(spec)
    assert order is not None
    assert order.complete(np.full((2, MAX_WRITERS), 2**16 - 1, np.uint16)).tolist() == [4, 4]


def test_a_pool_of_absurdly_many_parts_has_none() -> None:
    planes = tuple(Plane(f"p{i}", (1,) * 1024, 32) for i in range(16))
    assert LayerOrder.of(PoolSpec("p", "m", "d", 16, "h", "", "x", 32, planes)) is None
