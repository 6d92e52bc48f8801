"""A prompt is computed by an engine of one TP size and decoded by one of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsieve.v1 import store_pb2
from kvsieve_store.client import ArenaMap, StoreClient
from kvsieve_store.client.admin import AdminClient
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import PoolSpec
from tests.engine.generate import prompt
from tests.pd.conftest import BLOCK, WAIT, Host
from tests.pd.test_handoff import prefilled

seeds = itertools.count(900)


@pytest.fixture(scope="module")
def hosts(tiny_qwen3: Path) -> Iterator[tuple[Host, Host]]:
    """With one rank and with two, of a model with two KV heads."""
    args = {"dtype": "float32", "enable_prefix_caching": False}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        one, two = Host(tiny_qwen3, "tcp", **args), Host(tiny_qwen3, "tcp", **args, **ranks)
    for host in (one, two):
        host.engine.wait_ready()
        host.engine.wait_attached()
    yield one, two
    two.close()
    one.close()


def payloads(host: Host) -> dict[bytes, np.ndarray]:
    """By key, float32 [shards, n]: what each rank has of each block in the host's store."""
    spec = PoolSpec.from_proto(store_pb2.PoolSpec.FromString(bytes.fromhex(host.engine.state()["pool"])))
    (plane,) = spec.planes
    assert (plane.heads, plane.head_runs, plane.is_splittable) == (2, 1, True)
    (shards,) = SlotLayout.of(spec).layer_offsets
    size = sum(plane.layer_bytes)
    found = {}
    with AdminClient(host.store.endpoint) as admin:
        keys = [block.key for block in admin.list_blocks(spec.name, page_size=1000).blocks]
    with StoreClient(host.store.endpoint, spec, engine_id="looks", credit_target=0) as client:
        attachment = client.wait_attached(WAIT)
        with ArenaMap(attachment) as arena:
            for key in keys:
                match = client.match([key])
                slot = arena.slot(match.refs[0].slot)
                raw = np.stack([slot[at[0] : at[0] + size] for at in shards])
                found[key] = raw.view(np.float32)
    return found


@pytest.mark.parametrize("back", [False, True], ids=["1-to-2", "2-to-1"])
def test_the_other_engine_goes_on_with_the_same_tokens(hosts: tuple[Host, Host], back: bool) -> None:
    prefill, decode = reversed(hosts) if back else hosts
    for length in (300, 4 * BLOCK + 7):
        ids = prompt(length, next(seeds))
        params = prefilled(prefill, ids)
        assert params["kvsieve_tokens"] == length
        computed, blocks = decode.engine.computed, decode.metric("kvsieve_peer_pulled_blocks_total")
        handed = decode.engine.ask(ids, **params)["tokens"]
        assert handed == prefill.engine.ask(ids)["tokens"]
        assert decode.engine.computed == computed + 1
        assert decode.metric("kvsieve_peer_pulled_blocks_total") == blocks + length // BLOCK + 1
    prefill.settled()
    decode.settled()


def test_blocks_are_what_the_other_engine_computes_itself(hosts: tuple[Host, Host]) -> None:
    """Head by head: how each rank packs its keys does not depend on how many ranks there are."""
    one, two = hosts
    ids = prompt(6 * BLOCK, next(seeds))
    for host in hosts:
        host.clear()
    two.engine.ask(ids, 1, **prefilled(one, ids))
    two.settled()
    came = payloads(two)
    two.clear()
    two.engine.ask(ids, 1)
    two.settled()
    computed = payloads(two)
    full = came.keys() & computed.keys()
    assert len(full) == 6
    for key in full:
        assert computed[key].std() > 0.1
        assert np.allclose(came[key], computed[key], atol=1e-3)
        assert not np.allclose(came[key], computed[key][::-1], atol=1e-3)  # the ranks differ
