"""The kernels against the bodies that their references pass, and long random traces of real sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

from kvsieve_connector.device import upload  # noqa: E402
from kvsieve_connector.kernels import copy_blocks, fetch_pages, gather_context, swap_in  # noqa: E402
from tests.unit import copy_bodies as bodies  # noqa: E402
from tests.unit.swap_in_bodies import BODIES  # noqa: E402
from tests.unit.swap_in_trace import Face, Size, run  # noqa: E402

KERNEL = Face(swap_in, "cuda")

LONG = {
    "batch 1": (Size(batch=1, slots=2, blocks=96, k=2048, hot_blocks=64), 500),
    "batch 8": (Size(batch=8, slots=10, blocks=96, k=2048, hot_blocks=64), 500),
    "batch 64": (Size(batch=64, slots=70, blocks=64, k=2048, hot_blocks=64), 500),
    "three query tokens": (Size(batch=8, slots=9, blocks=128, k=2048, hot_blocks=144, query_tokens=3), 200),
    "three query tokens, exactly": (
        Size(batch=4, slots=5, blocks=96, k=1024, hot_blocks=48, query_tokens=3),
        200,
    ),
    "exactly k": (Size(batch=8, slots=9, blocks=64, k=2048, hot_blocks=32), 500),
    "bf16": (Size(batch=8, slots=9, blocks=64, k=2048, hot_blocks=64, row_bytes=1152), 200),
    "odd k": (Size(batch=5, slots=6, blocks=32, k=515, hot_blocks=16), 200),
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[Face], None]) -> None:
    body(KERNEL)


@pytest.mark.parametrize("case", LONG)
def test_long_trace(case: str) -> None:
    size, steps = LONG[case]
    trace = run(KERNEL, size, seed=21, steps=steps)
    assert trace.counter("unplaced_rows") == 0


def test_long_trace_with_prefetch() -> None:
    run(KERNEL, Size(batch=8, slots=9, blocks=64, k=1024, hot_blocks=48), seed=22, steps=200, prefetch=True)


@pytest.mark.parametrize("case", bodies.GATHERS)
def test_gather_context(case: str) -> None:
    bodies.gather(gather_context, "cuda", *bodies.GATHERS[case])


@pytest.mark.parametrize("case", bodies.FETCHES)
def test_fetch_pages(case: str) -> None:
    bodies.fetch(fetch_pages, "cuda", *bodies.FETCHES[case])


@pytest.mark.parametrize("to_host", [True, False])
def test_copy_pieces(to_host: bool) -> None:
    bodies.copy(copy_blocks, "cuda", to_host, bodies.SIZES)


@pytest.mark.parametrize("values", [[[1, 2], [3, -4]], [], np.array([7, 8])], ids=repr)
def test_upload(values: Any) -> None:
    on_device = upload(values, torch.int32, torch.device("cuda"))
    assert on_device.dtype == torch.int32
    assert on_device.tolist() == np.asarray(values).tolist()
