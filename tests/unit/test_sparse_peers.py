"""Ranks that exchange their addresses: what they end up with; all share, or every one fetches for itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvsieve_connector.kernels.tables import LayerCache, Peers  # noqa: E402
from kvsieve_connector.settings import parse_settings  # noqa: E402
from kvsieve_connector.sparse.peers import Memory, Unshared, connect, share, unsound  # noqa: E402
from kvsieve_connector.sparse.prefetch import make_policy  # noqa: E402
from kvsieve_connector.sparse.tables import HostTables, TableSizes  # noqa: E402

SIZES = TableSizes(slots=2, blocks=8, pages=7, groups=2, hot_blocks=2, layers=3, block_tokens=8, rows=4)
IN_A_GROUP = 2
"""Layers of a KV group. The groups are at the same places of the pool."""
BASE = 1 << 20


class ThisProcess:
    """Memory of ranks that are threads of one process: all of it is at the same address for each."""

    def __init__(self) -> None:
        self.opened = 0

    def lend(self, address: int) -> tuple[bytes, int]:
        return (address // BASE * BASE).to_bytes(8, "little"), address % BASE

    def open(self, handle: bytes) -> int:
        self.opened += 1
        return int.from_bytes(handle, "little")

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        self.opened = 0


class Rank:
    def __init__(self, blocks: int = 5) -> None:
        self.tables = HostTables(SIZES, torch.device("cpu"))
        pool = torch.randint(256, (blocks, IN_A_GROUP, 8, 32), dtype=torch.uint8)
        self.pool, self.before = pool, pool.clone()
        self.memory: Any = ThisProcess()
        self.caches = [
            LayerCache(
                cache=pool[:, i % IN_A_GROUP],
                layer_offset=0,
                group=i // IN_A_GROUP,
                slot_of=self.tables.slot_of[i],
                tag=self.tables.tag[i],
                stamp=self.tables.stamp[i],
                clock=self.tables.clock[i],
                counters=self.tables.counters[i],
            )
            for i in range(SIZES.layers)
        ]


here = threading.local()
"""rank: whose thread it is."""


def connected(ranks: list[Rank]) -> list[list[Peers] | str]:
    """What connect() returns on each rank, or why it did not."""
    barrier, board = threading.Barrier(len(ranks)), {}

    def connect_one(number: int) -> list[Peers] | str:
        def exchange(value: Any) -> list[Any]:
            board[number] = value
            barrier.wait(20)
            values = [board[i] for i in range(len(ranks))]
            barrier.wait(20)
            return values

        here.rank, rank = number, ranks[number]
        try:
            return connect(number, len(ranks), exchange, rank.memory, rank.caches, rank.tables)
        except Unshared as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(connect_one, range(len(ranks))))


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_knows_where_the_others_are(count: int) -> None:
    ranks = [Rank() for _ in range(count)]
    found = connected(ranks)
    for number, peers in enumerate(found):
        assert not isinstance(peers, str)
        for i, layer in enumerate(peers):
            assert layer.rank == number
            assert layer.flags.shape == (SIZES.slots + 1, count)
            assert layer.places.tolist() == [
                [
                    other.caches[i].cache.data_ptr(),
                    other.caches[i].slot_of.data_ptr(),
                    theirs[i].flags.data_ptr(),
                ]
                for other, theirs in zip(ranks, found, strict=True)
            ]


def test_memory_is_left_as_it_was() -> None:
    ranks = [Rank(), Rank()]
    for rank, peers in zip(ranks, connected(ranks), strict=True):
        assert torch.equal(rank.pool, rank.before)
        assert bool((rank.tables.slot_of == -1).all())
        assert not any(layer.flags.any() for layer in peers)


def _no_handle(memory: Memory) -> None:
    def lend(address: int) -> tuple[bytes, int]:
        raise RuntimeError("no handle for it")

    memory.lend = lend  # type: ignore[method-assign]


def _not_open(memory: Memory) -> None:
    def refuse(handle: bytes) -> int:
        raise RuntimeError("peer access is not supported")

    memory.open = refuse  # type: ignore[method-assign]


def _elsewhere(memory: Memory) -> None:
    stock = memory.lend
    memory.lend = lambda address: (stock(address)[0], stock(address)[1] + 32)  # type: ignore[method-assign]


def _lost_writes(memory: Memory) -> None:
    stock = memory.write
    memory.write = lambda address, data: None if len(data) == 8 else stock(address, data)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (_no_handle, "rank 1: RuntimeError: no handle for it"),
        (_not_open, "rank 1: RuntimeError: peer access is not supported"),
        (_elsewhere, "rank 0: RuntimeError: rank 1's memory is not what it was said to be"),
        (_lost_writes, "rank 0: RuntimeError: what rank 1 wrote to this one has not arrived"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_on_one_rank_is_known_to_all(breaks: Callable[[Memory], None], reason: str) -> None:
    ranks = [Rank(), Rank(), Rank()]
    breaks(ranks[1].memory)
    assert connected(ranks) == [reason] * 3
    assert all(torch.equal(rank.pool, rank.before) for rank in ranks)


class Failing:
    """An object of which one call fails, as out of memory: the `at`-th of these names, on rank 1."""

    def __init__(self, of: Any, names: str, at: list[int]) -> None:
        self._of, self._names, self._at = of, names.split(), at

    def __getattr__(self, name: str) -> Any:
        stock = getattr(self._of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if here.rank == 1:
                self._at[0] -= 1
                if self._at[0] == 0:
                    raise MemoryError(name)
            return stock(*args, **kwargs)

        return call if name in self._names else stock


def test_whichever_call_fails_on_one_rank_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 1000):
        ranks, left = [Rank(), Rank()], [number]
        monkeypatch.setattr("kvsieve_connector.sparse.peers.torch", Failing(torch, "zeros tensor", left))
        ranks[1].memory = Failing(ranks[1].memory, "lend open read write", left)
        ranks[1].tables = Failing(ranks[1].tables, "mark", left)  # type: ignore[assignment]
        found = connected(ranks)
        if left[0] > 0:
            break
        assert isinstance(found[0], str), f"call {number}"
        assert found[0].startswith("rank 1: MemoryError: ")
        assert found[1] == found[0]
    assert number > 40
    assert not any(isinstance(each, str) for each in found)


def test_caches_of_different_shapes_are_not_shared() -> None:
    assert connected([Rank(), Rank(blocks=6)]) == ["the ranks' caches differ in shape"] * 2


def config(size: int, draft: int | None = None) -> Any:
    speculative = None if draft is None else SimpleNamespace(draft_tensor_parallel_size=draft)
    parallel = SimpleNamespace(tensor_parallel_size=size)
    return SimpleNamespace(parallel_config=parallel, speculative_config=speculative)


def test_where_hot_buffers_could_be_overwritten_they_are_not_shared() -> None:
    quiet = make_policy("previous-step", 3)
    assert unsound(config(2), quiet) == ""
    assert unsound(config(2, draft=2), quiet) == ""
    assert "draft_tensor_parallel_size" in unsound(config(2, draft=1), quiet)
    assert unsound(config(2), make_policy("index-share", 3, leaders=[0, 0, 2])) == ""
    assert unsound(config(2), make_policy("previous-layer", 3)) == ""
    margin = make_policy("previous-step+margin", 3)
    assert "kvsieve.prefetch='previous-step+margin'" in unsound(config(2), margin)


@pytest.mark.parametrize(("size", "wanted"), [(1, True), (1, "auto"), (2, False)])
def test_one_rank_and_the_default_share_nothing(size: int, wanted: object) -> None:
    rank = Rank()
    caches = {f"layer.{i}": cache for i, cache in enumerate(rank.caches)}
    settings = parse_settings({"kvsieve.mode": "sparse", "kvsieve.sharded_fetch": wanted})
    found, _ = share(config(size), settings, make_policy("none", 3), caches, rank.tables)
    assert found is caches
