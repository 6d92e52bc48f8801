"""SlotMap: what lands where, held against heads that are sliced from the whole model's block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol import spec as spec_module
from kvsieve_store.protocol.slot_map import SlotMap
from kvsieve_store.protocol.spec import Plane, PoolSpec
from tests.unit.head_shards import Model, slot_of, spec_of


def cut(slot_map: SlotMap, source: np.ndarray, fill: int) -> np.ndarray:
    """The target's slot, where it was full of `fill`."""
    target = np.full(slot_map.target_bytes, fill, np.uint8)
    for a, b, n in zip(
        slot_map.source.tolist(), slot_map.target.tolist(), slot_map.length.tolist(), strict=True
    ):
        target[b : b + n] = source[a : a + n]
    return target


@st.composite
def families(draw: st.DrawFn) -> tuple[list[Model], int, int]:
    """Planes, and two TP sizes of 1 to 32 that fit them."""
    source, target = draw(st.integers(1, 32)), draw(st.integers(1, 32))
    fitting = [h for h in range(1, 65) if all(not h % tp or not tp % h for tp in (source, target))]
    models = []
    for n in range(draw(st.integers(1, 3))):
        heads = draw(st.sampled_from([0, *fitting])) if fitting else 0
        runs = draw(st.integers(1, 3)) if heads else 0
        sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        models.append(Model(f"plane {n}", heads, runs, tuple(sizes)))
    return models, source, target


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "MIN_RUN_BYTES", 1)


@settings(max_examples=200, deadline=None)
@given(families())
def test_each_rank_finds_its_heads(family: tuple[list[Model], int, int]) -> None:
    models, source, target = family
    one, other = spec_of(models, source), spec_of(models, target)
    assert one.family_id() == other.family_id()
    slot_map = SlotMap.between(one, other)
    expected = slot_of(models, target, fill=7)
    if one == other:
        assert (slot_map.target, slot_map.length) == (0, len(expected))
        return
    assert (cut(slot_map, slot_of(models, source, fill=9), fill=7) == expected).all()
    # Each byte of the payload once, in order, and none of the padding.
    ends = slot_map.target + slot_map.length
    assert (slot_map.target[1:] >= ends[:-1]).all()
    payload = sum(sum(plane.layer_bytes) * plane.shards for plane in other.planes)
    assert int(slot_map.length.sum()) == payload
    at, lengths = slot_map.target_runs()
    filled = np.zeros(len(expected), np.bool_)
    for start, n in zip(at.tolist(), lengths.tolist(), strict=True):
        filled[start : start + n] = True
    assert int(filled.sum()) == payload
    if source <= target:  # no head is there twice over there, so back is the way it came
        back = SlotMap.between(other, one)
        assert (cut(back, expected, fill=9) == slot_of(models, source, fill=9)).all()


@given(families(), st.integers(0, 5), st.integers(1, 4))
def test_ranges_are_of_all_blocks(family: tuple[list[Model], int, int], first: int, count: int) -> None:
    models, source, target = family
    slot_map = SlotMap.between(spec_of(models, source), spec_of(models, target))
    ranges, places = slot_map.ranges(first, count)
    n = len(slot_map.source)
    assert ranges.shape == (count * n, 3)
    assert places.tolist() == slot_map.target.tolist() * count
    for i in range(count):
        mine = ranges[i * n : (i + 1) * n]
        assert (mine[:, 0] == first + i).all()
        assert (mine[:, 1:] == np.stack([slot_map.source, slot_map.length], axis=1)).all()


def test_neighbours_are_one_range() -> None:
    """A rank's heads of a layer come in one range, and a plane that all have whole in one, too."""
    models = [Model("main", 8, 1, (64,) * 5), Model("indexer", 0, 0, (100, 100))]
    slot_map = SlotMap.between(spec_of(models, 2), spec_of(models, 4))
    assert slot_map.length.tolist() == [128] * 20 + [200]


GQA = [Model("main", 4, 1, (8192, 8192))]


def with_plane(spec: PoolSpec, **fields: object) -> PoolSpec:
    return replace(spec, planes=(replace(spec.planes[0], **fields),))


OTHERS = {
    "block_tokens": replace(spec_of(GQA, 4), block_tokens=32),
    "hash_seed": replace(spec_of(GQA, 4), hash_seed="1"),
    "dtype": replace(spec_of(GQA, 4), dtype="fp8"),
    "layout": replace(spec_of(GQA, 4), layout="y"),
    "model": replace(spec_of(GQA, 4), model="n"),
    "tp_size: 2 .* 4 .* plane 'main' can't be split by heads: .*'x'": with_plane(
        spec_of(GQA, 4), heads=0, head_runs=0
    ),
    "planes: 'main' with 2 layers": with_plane(spec_of(GQA, 4), layer_bytes=(8192, 4096)),
    "planes: 'main' with 2": with_plane(spec_of(GQA, 4), heads=8),
    "planes: 'main'": with_plane(spec_of(GQA, 4), head_runs=2),
    "planes: .* 'other' with": with_plane(spec_of(GQA, 4), name="other"),
    "planes: .*, 'indexer' with": replace(
        spec_of(GQA, 4), planes=(*spec_of(GQA, 4).planes, Plane("indexer", (1,)))
    ),
}


@pytest.mark.parametrize("why", OTHERS)
def test_other_pools_are_refused_with_what_differs(why: str) -> None:
    mine, other = spec_of(GQA, 2), OTHERS[why]
    assert mine.family_id() != other.family_id()
    with pytest.raises(InvalidRequestError, match=why):
        SlotMap.between(other, mine)


def test_equal_specs_with_other_heads_are_not_mixed_up() -> None:
    """How a plane lies is not in the pool id, so that it is not compared either."""
    for runs in (1, 2, 4):
        models = [Model("main", 4, runs, (8192 // runs, 8192 // runs))]
        one, other = spec_of(models, 2), spec_of(models, 4)
        assert one == spec_of(GQA, 2)
        came = cut(SlotMap.between(one, other), slot_of(models, 2), fill=0)
        assert (came == slot_of(models, 4)).all()


def test_runs_that_are_too_short_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads inside of tokens, say: a range of a few hundred bytes for each token of each layer."""
    monkeypatch.setattr(spec_module, "MIN_RUN_BYTES", 4096)
    assert SlotMap.between(spec_of(GQA, 2), spec_of(GQA, 4))
    nhd = [Model("main", 4, 16, (512, 512))]
    with pytest.raises(InvalidRequestError, match=r"can't be split by heads: .* has 4096 bytes or more"):
        SlotMap.between(spec_of(nhd, 2), spec_of(nhd, 4))
    for tp in (1, 2, 4):
        assert spec_of(nhd, tp).family_id() == spec_of(nhd, tp).pool_id()
