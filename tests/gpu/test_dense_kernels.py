"""pick_blocks and summarise on the device, against the bodies that their references pass."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

from kvsieve_connector.kernels import pick_blocks, summarise  # noqa: E402
from tests.unit import pick_bodies as bodies  # noqa: E402

KERNEL = bodies.Face(pick_blocks.pick_blocks, summarise.summarise, "cuda")

LONG = {
    "batch 32": bodies.Long(
        bodies.Shape(lengths=tuple(range(300, 3500, 100)), heads=2, dim=128, budget=16, slack=8), steps=20
    ),
    "8 heads": bodies.Long(
        bodies.Shape(lengths=(20_000, 9000), heads=8, dim=128, budget=64, slack=34), steps=30
    ),
}


@pytest.mark.parametrize("case", bodies.SHAPES)
def test_picks(case: str) -> None:
    bodies.picks_what_scores_highest(KERNEL, bodies.SHAPES[case])


def test_rows_without_a_slot() -> None:
    bodies.leaves_rows_without_a_slot_alone(KERNEL)


@pytest.mark.parametrize("case", LONG)
def test_long_run(case: str) -> None:
    LONG[case].run(KERNEL)
