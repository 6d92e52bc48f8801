"""What a client is told of the room that its pool can have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsieve_store.client import StoreClient
from tests.conftest import StoreProcess
from tests.protocol.client_stores import SPEC


@pytest.mark.parametrize(
    ("flags", "extents"),
    [(["--pool-quota", "5MiB"], 5), (["--quotas", f"{SPEC.name}=3MiB", "--pool-quota", "5MiB"], 3), ([], 8)],
)
def test_a_pool_has_its_quota_or_the_arena(
    start_store: Callable[..., StoreProcess], flags: list[str], extents: int
) -> None:
    store = start_store("--pool-size", "8MiB", "--extent-size", "1MiB", *flags)
    with StoreClient(store.endpoint, SPEC, engine_id="e") as client:
        attachment = client.wait_attached(30)
        assert attachment.slots == extents * attachment.slots_per_extent
