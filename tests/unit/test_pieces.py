"""Which way pieces are copied."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvsieve_connector.copy import pieces
from kvsieve_connector.copy.pieces import KERNEL_BYTES, Pieces, by_dma, by_kernel, way_of


@pytest.mark.parametrize(
    ("largest", "alignment", "cupy", "way"),
    [
        (KERNEL_BYTES, 16, True, by_kernel),
        (KERNEL_BYTES + 16, 16, True, by_dma),
        (KERNEL_BYTES, 8, True, by_dma),
        (KERNEL_BYTES, 16, False, by_dma),
    ],
)
def test_small_pieces_go_by_the_kernel_where_it_can_run(
    largest: int, alignment: int, cupy: bool, way: pieces.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "find_spec", lambda name: object() if cupy else None)
    assert way_of(largest, alignment) is way


def test_reversed_pieces_go_back() -> None:
    some = Pieces()
    some.add(16, 4096, 32)
    some.add(64, 8192, 48)
    back = some.reversed()
    assert (back.sources, back.targets, back.sizes) == ([4096, 8192], [16, 64], [32, 48])
    assert some.copied == back.copied == 80
