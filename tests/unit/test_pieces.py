"""Which way pieces are copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvsieve_connector.copy import pieces
from kvsieve_connector.copy.cuda import Run, RunTable
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
    some = Pieces(np.array([16, 64]), np.array([4096, 8192]), np.array([32, 48]))
    back = some.reversed()
    assert _listed(back) == [(4096, 16, 32), (8192, 64, 48)]
    assert some.copied == back.copied == 80


@given(data=st.data(), groups=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_run_of_every_page_in_the_cache_is_copied(data: st.DataObject, groups: list[int]) -> None:
    """groups: pages of a block in each KV group."""
    number = st.integers(0, 2**40)
    runs = data.draw(
        st.lists(
            st.builds(
                lambda group, start, stride, size, offset: Run(
                    start, stride, size, offset, group, groups[group]
                ),
                st.integers(0, len(groups) - 1),
                number,
                number,
                st.integers(1, 1 << 20),
                number,
            ),
            max_size=4,
        )
    )
    ids = st.integers(0, 9)
    block = st.tuples(*(st.tuples(*[ids] * pages) for pages in groups))
    blocks = data.draw(st.lists(st.tuples(number, block), max_size=4))
    expected = [
        (run.start + page * run.stride, base + run.offset + i * run.size, run.size)
        for base, pages in blocks
        for run in runs
        for i, page in enumerate(pages[run.group])
        if page
    ]
    pieces = RunTable(runs).pieces([base for base, _ in blocks], [pages for _, pages in blocks])
    assert sorted(_listed(pieces)) == sorted(expected)


def _listed(pieces: Pieces) -> list[tuple[int, int, int]]:
    return list(zip(pieces.sources.tolist(), pieces.targets.tolist(), pieces.sizes.tolist(), strict=True))
