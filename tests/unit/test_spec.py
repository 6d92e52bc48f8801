"""PoolSpec: what is refused before anything is built from a message."""

from __future__ import annotations

import pytest

from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol import spec as spec_module
from kvsieve_store.protocol.limits import MAX_LAYERS, MAX_PLANES
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
