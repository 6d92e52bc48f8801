"""Scenes on a real store process: its client, and its arena as the workers map it."""

from __future__ import annotations

import struct
import time
from typing import Any

from kvsieve_store.client import ArenaMap, StoreClient
from kvsieve_store.protocol.spec import Plane, PoolSpec
from tests.conftest import StoreProcess
from tests.engine.sparse_scene import Scene
from tests.engine.sparse_vllm import BLOCK, INDEXER_ROW_BYTES, ROW_BYTES
from tests.fault.proxy import Proxy


class RealClient(StoreClient):
    """A StoreClient that a Scene can use: what it is asked, the store answers in a moment."""

    target = 8

    def tick(self, count: int = 0) -> None:
        time.sleep(0.002)


_ROWS = struct.Struct(f"<{BLOCK}q")


class RealArenas(dict[int, Any]):
    """Epoch -> the arena, mapped as a worker does. A slot's first bytes hold the rows' numbers."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self.client = client

    def __missing__(self, epoch: int) -> Any:
        attachment = self.client.attachment
        assert attachment is not None
        assert attachment.epoch == epoch
        memory = next((mapped.arena.memory for mapped in self.values()), None)
        self[epoch] = arena = MappedArena(ArenaMap(attachment, memory))
        return arena

    def __delitem__(self, epoch: int) -> None:
        self[epoch].arena.close()
        super().__delitem__(epoch)


class MappedArena:
    def __init__(self, arena: ArenaMap) -> None:
        self.arena = arena

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        return _ROWS.unpack(self.arena.slot(slot)[: _ROWS.size].tobytes())

    def __setitem__(self, slot: int, what: tuple[int, ...]) -> None:
        self.arena.slot(slot)[: _ROWS.size] = bytearray(_ROWS.pack(*what))


def connect(store: StoreProcess | Proxy, layers: int = 10) -> RealClient:
    """A session with the store, for blocks of so many layers."""
    spec = PoolSpec(
        name="m",
        model="m",
        dtype="fp8",
        block_tokens=BLOCK,
        hash_algo="sha256",
        hash_seed="",
        layout="BLHNC",
        tp_size=1,
        planes=(
            Plane("main", (BLOCK * ROW_BYTES,) * layers),
            Plane("indexer", (BLOCK * INDEXER_ROW_BYTES,) * layers),
        ),
    )
    client = RealClient(store.endpoint, spec, engine_id="e", credit_target=RealClient.target, lease_ms=600)
    client.start()
    client.wait_attached(20)
    return client


def close(scene: Scene) -> None:
    """The engine is gone."""
    scene.client.close()
    for mapped in scene.arenas.values():
        mapped.arena.close()
