"""The references of gather_context, fetch_pages and copy_pieces."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvsieve_connector.kernels import (  # noqa: E402
    copy_blocks_reference,
    fetch_pages_reference,
    gather_context_reference,
)
from tests.unit import copy_bodies as bodies  # noqa: E402


@pytest.mark.parametrize("case", bodies.GATHERS)
def test_gather_context(case: str) -> None:
    bodies.gather(gather_context_reference, "cpu", *bodies.GATHERS[case])


@pytest.mark.parametrize("case", bodies.FETCHES)
def test_fetch_pages(case: str) -> None:
    bodies.fetch(fetch_pages_reference, "cpu", *bodies.FETCHES[case])


@pytest.mark.parametrize("to_host", [True, False])
def test_copy_pieces(to_host: bool) -> None:
    bodies.copy(copy_blocks_reference, "cpu", to_host, bodies.SIZES)


def test_bad_arguments_are_named() -> None:
    staging, addresses = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 pages, but the staging area holds 2"):
        fetch_pages_reference.fetch_pages(staging, addresses, 1)
    with pytest.raises(ValueError, match="a multiple of 16 bytes, got 72"):
        fetch_pages_reference.fetch_pages(torch.zeros(2, 72, dtype=torch.uint8), addresses[:1], 1)
    with pytest.raises(ValueError, match="n_blocks must be >= 1, got 0"):
        fetch_pages_reference.fetch_pages(staging, addresses[:1], 0)
    with pytest.raises(ValueError, match=r"bytes must be torch.int64 \[3\]"):
        copy_blocks_reference.copy_pieces(addresses, addresses, addresses.int())
