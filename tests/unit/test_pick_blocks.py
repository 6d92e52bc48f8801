"""pick_blocks and summarise in torch; tests/gpu/test_dense_kernels.py runs the same bodies on the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsieve_connector.dense.gpu import pick_blocks_reference, summarise_reference
from kvsieve_connector.kernels.block_tables import check_pick
from kvsieve_connector.kernels.pick_blocks import CLUSTERS, Variant, choose
from kvsieve_connector.kernels.summarise import KeySources
from tests.unit import pick_bodies as bodies

REFERENCE = bodies.Face(pick_blocks_reference.pick_blocks, summarise_reference.summarise, "cpu")


@pytest.mark.parametrize("case", bodies.SHAPES)
def test_picks(case: str) -> None:
    bodies.picks_what_scores_highest(REFERENCE, bodies.SHAPES[case])


def test_rows_without_a_slot() -> None:
    bodies.leaves_rows_without_a_slot_alone(REFERENCE)


def test_long_run() -> None:
    bodies.Long(bodies.Shape(), steps=40).run(REFERENCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"caches": [torch.zeros(9, 2, 16, 128), torch.zeros(9, 2, 16, 64)]}, "caches differ"),
        ({"caches": [torch.zeros(9, 2, 16, 128)] * 2}, "bfloat16 or float16, got torch.float32"),
        ({"pool": torch.zeros(3, dtype=torch.int64)}, "pool"),
        ({"offsets": torch.zeros(2, dtype=torch.int32)}, "offsets"),
    ],
    ids=["shapes", "dtype", "pool", "offsets"],
)
def test_refuses_sources_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    fit = {"caches": [torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16)] * 2, "pool": zeros, "offsets": zeros}
    given = fit | change
    with pytest.raises(ValueError, match=message):
        KeySources(tuple(given["caches"]), given["pool"], given["offsets"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 99}, "hot buffer"),
        ({"window": 0}, "window"),
        ({"selector": "none"}, "selector"),
        ({"first": -1}, "first"),
    ],
    ids=lambda value: str(value),
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    from dataclasses import replace

    scene = bodies.Scene(REFERENCE, bodies.Shape())
    picks = replace(scene.shape.picks, **change)
    rows, heads, group, dim = 2, 2, 4, 64
    with pytest.raises(ValueError, match=message):
        check_pick(
            scene.layers[0],
            scene.tables,
            picks,
            torch.zeros((rows, heads * group, dim), dtype=torch.bfloat16),
            torch.ones(rows, dtype=torch.int32),
            scene.block_table,
            torch.zeros((rows * heads, 200), dtype=torch.int32),
            torch.zeros(rows * heads, dtype=torch.int32),
            torch.zeros((rows * heads, group, dim), dtype=torch.bfloat16),
        )


@pytest.mark.parametrize(
    ("clusters", "kib", "wanted"),
    [
        (8, (50, 60, 80, 110), 8),
        (16, (50, 60, 80, 110), 8),
        (17, (50, 60, 80, 110), 4),
        (64, (50, 60, 80, 110), 2),
        (132, (50, 60, 80, 150), 1),
        (133, (50, 60, 80, 110), 1),
        (133, (50, 60, 80, 150), 2),
        (133, (50, 60, 80, 113.25), 2),
        (67, (120, 130, 150, 200), 1),
        (133, (120, 130, 150, 200), 1),
        (133, (120, 200), 4),
    ],
)
def test_how_many_thread_blocks_work_on_a_row(clusters: int, kib: tuple[float, ...], wanted: int) -> None:
    """kib: shared memory of a thread block, by how many there are; a multiprocessor has 227."""
    variants = [Variant(ctas, int(size * 1024), None) for ctas, size in zip(CLUSTERS, kib, strict=False)]
    assert choose(variants, clusters, 132).ctas == wanted
