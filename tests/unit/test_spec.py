"""PoolSpec: what is refused before anything is built from a message."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol import spec as spec_module
from kvsieve_store.protocol.limits import MAX_HEADS, MAX_LAYERS, MAX_PLANES
from kvsieve_store.protocol.spec import Plane, PoolSpec
from tests.unit.state_driver import spec


@pytest.mark.parametrize("what", ["planes", "layer_bytes"])
def test_a_message_with_too_much_is_refused_before_planes_are_built(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    message = spec().to_proto()
    if what == "planes":
        for _ in range(MAX_PLANES):
            message.planes.add()
        expected = rf"pool.planes \(count\): {MAX_PLANES + 1} given, 1 to {MAX_PLANES} allowed"
    else:
        message.planes.add(name="indexer", layer_bytes=[1] * (MAX_LAYERS + 1), shards=1)
        expected = rf"pool.planes\[1\].layer_bytes \(count\): {MAX_LAYERS + 1} given, 1 to {MAX_LAYERS}"
    built: list[object] = []
    monkeypatch.setattr(spec_module, "Plane", lambda *parts: built.append(parts) or Plane(*parts))
    with pytest.raises(InvalidRequestError, match=expected):
        PoolSpec.from_proto(message)
    assert built == []


def test_a_message_at_the_limits_is_taken() -> None:
    message = spec().to_proto()
    for number in range(1, MAX_PLANES):
        message.planes.add(name=str(number), layer_bytes=[1] * MAX_LAYERS, shards=1)
    assert len(PoolSpec.from_proto(message).planes) == MAX_PLANES


@pytest.mark.parametrize(
    ("heads", "head_runs", "shards", "layer_bytes", "expected"),
    [
        (MAX_HEADS + 1, 1, 1, 8192, rf"planes\[0\].heads: {MAX_HEADS + 1} given, 0 to {MAX_HEADS} allowed"),
        (0, 1, 1, 8192, r"planes\[0\].head_runs: 1 given, 0 to 0 allowed"),
        (8, 0, 1, 8192, r"planes\[0\].head_runs: 0 given, 1 to 1048576 allowed"),
        (8, (1 << 20) + 1, 1, 8192, r"planes\[0\].head_runs: 1048577 given, 1 to 1048576 allowed"),
        (6, 1, 4, 8192, r"planes\[0\].heads: 6 given, which 4 shards can't share equally"),
        (
            8,
            3,
            4,
            8192,
            r"planes\[0\].layer_bytes\[0\]: 8192 given, not a multiple of 3 head_runs of 2 heads",
        ),
        (
            8,
            1 << 20,
            1,
            8192,
            r"planes\[0\].layer_bytes\[0\]: 8192 given, not a multiple of 1048576 head_runs",
        ),
    ],
)
def test_heads_that_can_not_be_are_refused(
    heads: int, head_runs: int, shards: int, layer_bytes: int, expected: str
) -> None:
    message = spec().to_proto()
    del message.planes[1:]
    plane = message.planes[0]
    plane.heads, plane.head_runs, plane.shards, plane.layer_bytes[:] = heads, head_runs, shards, [layer_bytes]
    with pytest.raises(InvalidRequestError, match=expected):
        PoolSpec.from_proto(message)


def test_how_a_plane_lies_by_heads_is_not_in_the_pool_id() -> None:
    """It follows from the rest, and engines that do not tell it share the pool."""
    known, unknown = (
        PoolSpec("p", "m", "bf16", 16, "sha256", "0", "x", 2, (Plane("main", (8192,), 2, *heads),))
        for heads in ((4, 1), ())
    )
    assert (known, known.pool_id()) == (unknown, unknown.pool_id())
    assert unknown.family_id() == unknown.pool_id() != known.family_id()
    (plane,) = PoolSpec.from_proto(known.to_proto()).planes
    assert (plane.heads, plane.head_runs, plane.run_bytes, plane.is_splittable) == (4, 1, (4096,), True)
