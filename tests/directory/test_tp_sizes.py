"""Blocks of engines of other TP sizes, found by the directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvsieve_store.client import Fetch
from kvsieve_store.directory.table import block_name
from tests.conftest import StoreProcess, free_port
from tests.directory.redis_server import RedisServer
from tests.directory.test_stores import announced, connect
from tests.peers.test_tp_sizes import ranks
from tests.protocol.client_stores import until

COUNT = 50


def test_a_prefix_of_another_tp_size_is_found(
    redis: RedisServer, start_store: Callable[..., StoreProcess]
) -> None:
    with ExitStack() as exits:
        source, target, same = (
            exits.enter_context(
                ranks(
                    start_store,
                    tp,
                    *("--directory", redis.url, "--listen", f"127.0.0.1:{free_port()}"),
                    *("--peer-transports", "tcp"),
                )
            )
            for tp in (2, 4, 2)
        )
        keys = source.save(COUNT)
        announced(redis, COUNT, 3)
        for host in (target, same):
            match = host.client.match(keys, fetch=Fetch(20.0))
            assert (len(match.refs), match.fetched) == (COUNT, COUNT)
            host.client.release(match.lease_ids)
            assert host.holds(keys) == COUNT
        # All of them are named, for whoever comes next.
        family = source.spec.family_id()
        assert family == target.spec.family_id()
        client = connect(redis)
        until(lambda: all(client.scard(block_name(family, key)) == 3 for key in (keys[0], keys[-1])))
        for host in (source, target, same):
            host.settled()
