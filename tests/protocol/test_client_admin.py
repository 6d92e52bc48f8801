"""AdminClient against a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsieve_store.client import AdminClient, StoreClient
from kvsieve_store.errors import InvalidRequestError, NotFoundError, UnavailableError
from tests.protocol.client_stores import SLOT_BYTES, SPEC, chain, key, store_thread, write_chain


@pytest.fixture
def admin() -> Iterator[AdminClient]:
    """Of a store with one engine and one chain of four blocks."""
    with (
        store_thread() as endpoint,
        AdminClient(endpoint) as admin,
        StoreClient(endpoint, SPEC, engine_id="engine-0", credit_target=4) as engine,
    ):
        engine.wait_attached(20)
        write_chain(engine, chain(4))
        yield admin


def test_listings(admin: AdminClient) -> None:
    status = admin.status()
    assert (status.state, status.pools, status.sessions, status.sealed_blocks) == ("ready", 1, 1, 4)
    assert status.sealed_bytes == 4 * SLOT_BYTES
    (session,) = admin.list_sessions().sessions
    assert (session.engine_id, session.pool, session.state) == ("engine-0", "tests", "attached")
    assert session.client.startswith("kvsieve-client/")
    (pool,) = admin.list_pools().pools
    assert pool.pool_id == SPEC.pool_id().hex()


def test_blocks_come_page_by_page(admin: AdminClient) -> None:
    keys = []
    token = ""
    while True:
        page = admin.list_blocks(SPEC.pool_id().hex()[:8], page_size=3, page_token=token)
        keys += [block.key for block in page.blocks]
        if not (token := page.next_page_token):
            break
    assert sorted(keys) == sorted(chain(4))


def test_pins_protect_from_eviction_until_they_are_gone(admin: AdminClient) -> None:
    assert admin.pin("tests", [key(1), key(99)]).unknown == 1
    evicted = admin.evict("tests", count=4)
    assert evicted.evicted == 2
    assert admin.unpin("tests").unpinned == 1
    assert admin.evict("tests", keys=key(1)).evicted == 1
    assert admin.clear("tests").dropped == 1
    assert admin.clear().dropped == 0


def test_errors_are_of_this_package(admin: AdminClient) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        admin.list_blocks("nobody")
    with pytest.raises(InvalidRequestError, match="page_size"):
        admin.list_blocks("tests", page_size=1_001)
    with pytest.raises(InvalidRequestError, match=r"keys: 3 bytes given"):
        admin.evict("tests", keys=b"abc")
    with pytest.raises(InvalidRequestError, match=r"count: -1 given"):
        admin.evict("tests", count=-1)


def test_drain_answers_when_the_wait_is_over(admin: AdminClient) -> None:
    assert admin.drain(timeout_ms=1).leases_left == 0


def test_no_store(unused_port: int) -> None:
    with (
        AdminClient(f"127.0.0.1:{unused_port}") as admin,
        pytest.raises(UnavailableError, match=f"store at 127.0.0.1:{unused_port}: "),
    ):
        admin.status()
