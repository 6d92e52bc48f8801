"""Blocks of several planes and shards, read while each rank writes its own part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvsieve_store.client import ArenaMap, StoreClient
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.spec import Plane, PoolSpec
from tests.peers.conftest import WAIT, Host
from tests.protocol.client_stores import chain, entries, until

SPEC = PoolSpec(
    "sharded",
    "model",
    "bfloat16",
    16,
    "sha256",
    "0",
    "test",
    2,
    (Plane("main", (1000, 3000), 2), Plane("indexer", (512, 700), 1), Plane("other", (4096,), 2)),
)
LAYOUT = SlotLayout.of(SPEC)
WRITES = [
    # rank, plane, layer, and the layers of all ranks that are there then
    (1, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 0, 1, 1),
    (1, 0, 1, 2),
    (0, 1, 0, 3),
    (1, 2, 0, 3),
    (0, 1, 1, 4),
    (0, 2, 0, 5),
]
"""In an order in which two ranks might."""

SIZES = [2 * 1000, 2 * 3000, 512, 700, 2 * 4096]


@pytest.fixture
def transport() -> str:
    return "tcp"


def test_a_layer_is_read_once_every_rank_has_written_it(pair: tuple[Host, Host]) -> None:
    source, target = pair
    keys = chain(3)
    content = np.random.default_rng(0).integers(0, 256, (len(keys), LAYOUT.slot_bytes), np.uint8)
    with (
        StoreClient(source.store.endpoint, SPEC, engine_id="writer", credit_target=3) as writer,
        StoreClient(target.store.endpoint, SPEC, engine_id="reader", credit_target=0) as reader,
        ArenaMap(writer.wait_attached(WAIT)) as arena,
        ThreadPoolExecutor() as pool,
    ):
        attachment = reader.wait_attached(WAIT)
        refs = writer.take_credits(3)
        batch = entries(keys, refs)
        writer.announce(batch)
        pulled = pool.submit(
            reader.pull, source.store.endpoint, keys, seconds=2 * WAIT, wait_seconds=2 * WAIT
        )
        done = [0, 0]
        for rank, plane, layer, there in WRITES:
            done[rank] += 1
            at = LAYOUT.layer_offsets[plane][rank if SPEC.planes[plane].shards > 1 else 0][layer]
            part = slice(at, at + SPEC.planes[plane].layer_bytes[layer])
            for i, ref in enumerate(refs):
                arena.slot(ref.slot)[part] = content[i, part]
                arena.set_layers_done(ref.slot, rank, done[rank])
            read = sum(SIZES[:there]) * len(refs)
            until(lambda read=read: target.metric("kvsieve_peer_read_bytes_total") == read)
        for i, ref in enumerate(refs):  # padding, which nobody writes, belongs to a block, too
            content[i] = arena.slot(ref.slot)
        writer.seal(batch)
        answer = pulled.result(WAIT)
        assert (answer.present, answer.damaged, answer.reason) == (3, 0, "")
        with ArenaMap(attachment) as here:
            found = [here.slot(ref.slot) for ref in reader.match(keys).refs]
            assert all((slot == block).all() for slot, block in zip(found, content, strict=True))
