"""Blocks go to the arena in any order, contexts grow, and pages are copied from where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_connector.copy.base import LayerPages
from kvsieve_connector.dense.contexts import HostContext, HostContexts
from kvsieve_connector.dense.pages import Pages

HEADS, PIECE = 3, 16


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 1 << 60)), max_size=60), st.integers(0, 400))
def test_slots_are_those_that_were_added(blocks: list[tuple[int, int]], count: int) -> None:
    context, model = HostContext(2, HEADS, 4), {}
    for index, address in blocks:
        if index in model:
            with pytest.raises(RuntimeError, match="in the arena already"):
                context.add([(index, address)])
        else:
            context.add([(index, address)])
            model[index] = address
    assert context.arena_blocks == len(model)
    assert context.slots(count).tolist() == [model.get(i, 0) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_summaries_stay_where_they_were_put(dtype: torch.dtype, counts: list[int]) -> None:
    context = HostContext(2, HEADS, 4, dtype)
    whole = torch.randn(2, sum(counts), HEADS, 4).to(dtype)
    for count in counts:
        first = context.summarised
        for layer in range(2):
            context.summarise(layer, first, whole[layer, first : first + count])
        context.summarised = first + count
        for layer in range(2):
            assert torch.equal(context.summaries(layer, first + count), whole[layer, : first + count])


def test_a_request_begins_once_and_may_begin_again() -> None:
    contexts = HostContexts(1, HEADS, 4)
    contexts.begin("r")
    with pytest.raises(RuntimeError, match="host-backed already"):
        contexts.begin("r")
    contexts.add("r", [(0, 1)])
    contexts.end("r")
    contexts.end("r")
    assert contexts.get("r") is None
    contexts.begin("r")
    again = contexts.get("r")
    assert again is not None
    assert again.arena_blocks == 0


@st.composite
def _picks(draw: st.DrawFn) -> tuple[list[bool], list[list[int]]]:
    """Which of some blocks are in the arena, and blocks that each head picks."""
    blocks = draw(st.integers(1, 12))
    one = st.lists(st.integers(0, blocks - 1), min_size=HEADS, max_size=HEADS)
    return draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)), draw(st.lists(one, max_size=8))


@given(_picks())
def test_pages_and_pieces_come_from_where_they_are(given_: tuple[list[bool], list[list[int]]]) -> None:
    in_arena, picked = given_
    layers, count = 2, len(in_arena)
    generator = torch.Generator().manual_seed(count)
    truth = torch.randint(0, 256, (layers, count, HEADS, PIECE), dtype=torch.uint8, generator=generator)
    pool = torch.zeros((layers, count + 1, HEADS * PIECE), dtype=torch.uint8)
    offsets = [64, 64 + 5 * HEADS * PIECE]
    arena = torch.zeros((count, 1024), dtype=torch.uint8)
    slots = np.zeros(count, np.int64)
    for i, away in enumerate(in_arena):
        for layer in range(layers):
            page = truth[layer, i].flatten()
            if away:
                arena[i, offsets[layer] : offsets[layer] + HEADS * PIECE] = page
                slots[i] = arena[i].data_ptr()
            else:
                pool[layer, i + 1] = page
    pages = Pages([LayerPages(f"l{i}", pool[i], offsets[i], 0, 1, True) for i in range(layers)], HEADS)
    blocks = np.arange(1, count + 1)
    for layer in range(layers):
        addresses = pages.addresses(layer, blocks, slots)
        whole = torch.zeros((count, HEADS, PIECE), dtype=torch.uint8)
        pages.copy(whole, addresses)
        assert torch.equal(whole, truth[layer])
        lists = np.array(picked, np.int64).reshape(-1, HEADS)
        pieces = torch.zeros((len(picked), HEADS, PIECE), dtype=torch.uint8)
        pages.copy_pieces(pieces, addresses[lists])
        assert torch.equal(pieces, truth[layer][torch.from_numpy(lists), torch.arange(HEADS)])


def test_pages_of_two_sizes_are_refused() -> None:
    layers = [LayerPages(f"l{n}", torch.zeros((2, n), dtype=torch.uint8), 0, 0, 1, True) for n in (48, 96)]
    with pytest.raises(ValueError, match=r"pages of \[48, 96\] bytes"):
        Pages(layers, HEADS)
