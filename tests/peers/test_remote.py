"""An engine reads rows and blocks of another store, without pulling them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsieve_store.client import RemoteBlocks
from kvsieve_store.errors import InvalidRequestError, LinkError, NotFoundError
from kvsieve_store.protocol.spec import Plane, PoolSpec
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.rows import row_ranges
from kvsieve_store.transport.ucx.binding import why_missing
from kvsieve_store.transport.ucx.engine import Engine
from tests.conftest import StoreProcess
from tests.peers.conftest import BLOCK, LAYERS, SPEC, content, host
from tests.protocol.client_stores import chain
from tests.transport.conftest import private
from tests.transport.peer import LOOPBACK

ROW = 656
LAYER = BLOCK // LAYERS


@pytest.mark.parametrize("transport", ["shm", "ucx", "tcp"])
def test_rows_of_chosen_layers_in_one_call(start_store: Callable[..., StoreProcess], transport: str) -> None:
    if transport == "ucx" and why_missing():
        pytest.skip(str(why_missing()))
    rng = np.random.default_rng(3)
    with host(start_store) as source:
        keys = source.save(20)
        blocks, rows = rng.integers(0, 20, 700), rng.integers(0, LAYER // ROW, 700)
        ranges = row_ranges(SPEC, "main", [3, 1], blocks, rows, ROW)
        memory, buffer = private(len(ranges) * ROW)
        into = np.arange(len(ranges), dtype=np.uint64) * np.uint64(ROW)
        engine = Engine("tcp", LOOPBACK) if transport == "ucx" else None
        with RemoteBlocks(
            source.store.endpoint, SPEC, keys + chain(1, 99), memory, engine=engine, transports=[transport]
        ) as remote:
            assert (remote.blocks, remote.slot_bytes, remote.transport) == (20, BLOCK, transport)
            remote.read(ranges, into)
            with pytest.raises(InvalidRequestError):
                remote.read(np.array([[20, 0, 1]], np.uint64), into[:1])
            remote.read(np.array([[7, 0, ROW]], np.uint64), into[-1:])
        expected = [
            content(int(block))[layer * LAYER + row * ROW :][:ROW]
            for layer in (3, 1)
            for block, row in zip(blocks, rows, strict=True)
        ]
        expected[-1] = content(7)[:ROW]
        assert (buffer.reshape(-1, ROW) == np.array(expected)).all()
        with pytest.raises(LinkError):
            remote.read(ranges, into)
        remote.close()
        if engine:
            engine.close()
        source.settled()


def test_what_the_store_has_not_got(start_store: Callable[..., StoreProcess]) -> None:
    with host(start_store) as source:
        source.save(1)
        with pytest.raises(NotFoundError, match="none of these"):
            RemoteBlocks(source.store.endpoint, SPEC, chain(1, 5), Memory([np.zeros(8, np.uint8)]))
        other = PoolSpec("x", "m", "d", 1, "h", "", "l", 1, SPEC.planes)
        with pytest.raises(NotFoundError, match="pool_id"):
            RemoteBlocks(source.store.endpoint, other, chain(1), Memory([np.zeros(8, np.uint8)]))
        source.settled()


class TestRows:
    SPEC = PoolSpec(
        "p", "m", "d", 16, "h", "", "l", 2, (Plane("main", (1000, 600), shards=2), Plane("indexer", (64,)))
    )

    def test_where_rows_lie(self) -> None:
        # Shards begin at multiples of 256 bytes.
        assert row_ranges(self.SPEC, "main", [1, 0], [4, 0], [5, 0], 100, shard=1).tolist() == [
            [4, 1792 + 1000 + 500, 100],
            [0, 1792 + 1000, 100],
            [4, 1792 + 500, 100],
            [0, 1792, 100],
        ]
        assert row_ranges(self.SPEC, "indexer", [0], [2], [7], 8).tolist() == [[2, 3584 + 56, 8]]
        assert row_ranges(self.SPEC, "main", [], [1], [1], 8).shape == (0, 3)

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            (("other", [0], [0], [0], 100), "plane"),
            (("main", [2], [0], [0], 100), "layers"),
            (("main", [-1], [0], [0], 100), "layers"),
            (("main", [1], [0, 0], [0, 6], 100), "rows"),
            (("main", [1], [0], [-1], 100), "rows"),
            (("main", [1], [-1], [0], 100), "rows"),
            (("main", [1], [0], [0], 0), "rows"),
            (("main", [1], [0], [0], -5), "rows"),
        ],
    )
    def test_what_there_is_not(self, arguments: tuple, field: str) -> None:
        with pytest.raises(InvalidRequestError, match=field):
            row_ranges(self.SPEC, *arguments)

    def test_a_shard_that_there_is_not(self) -> None:
        with pytest.raises(InvalidRequestError, match="shard"):
            row_ranges(self.SPEC, "main", [0], [0], [0], 100, shard=2)
