"""Dense models on GPUs, with the kernels' references on a CPU: tables, the batch, contexts put together for
prefill, and what the scheduler's half tells of blocks that fill."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import Request

from kvsieve_connector.copy.base import LayerPages
from kvsieve_connector.dense.gpu.build import dense_runtime
from kvsieve_connector.dense.gpu.runtime import DenseGpuRuntime
from kvsieve_connector.dense.gpu.tables import DenseSizes, DenseTables
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.dense.scheduler import DenseScheduler
from kvsieve_connector.dense.selectors import make_selector
from kvsieve_connector.metadata import HostFilled, StepOrders
from kvsieve_connector.sparse.hosts import Host, Hosts
from kvsieve_connector.sparse.runtime import BatchRow
from kvsieve_store.client import SlotRef

LAYERS, HEADS, TOKENS, DIM, BLOCKS, GROUP = 2, 2, 16, 64, 12, 4
SIZES = DenseSizes(slots=2, blocks=BLOCKS, pages=20, hot_blocks=6, layers=LAYERS, heads=HEADS, rows=4)
CPU = torch.device("cpu")


def plan(**changes: Any) -> DensePlan:
    values: dict[str, Any] = {
        "block_tokens": TOKENS,
        "budget_blocks": 2,
        "first_blocks": 1,
        "window_blocks": 1,
        "selector": "part-means",
        "dense_layers": 0,
        "max_blocks": BLOCKS,
        "max_num_seqs": 4,
        "hot_blocks": SIZES.hot_blocks,
        "host_tokens": 20 * TOKENS,
        "in_flight_tokens": 64,
    }
    return DensePlan(**values | changes)


class Engine:
    """A pool of a made-up context, block b in pool block b + 1, and the same context in an "arena"."""

    def __init__(self, **changes: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (BLOCKS + 10, LAYERS, HEADS, TOKENS, 2 * DIM)
        self.pool = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.arena = self.pool[1 : BLOCKS + 1].clone()  # slots: [LAYERS, HEADS, TOKENS, 2 * DIM] each
        layer_bytes = self.arena[0, 0].numel() * 2
        raw = self.pool.view(torch.uint8).view(BLOCKS + 10, LAYERS, -1)
        layers = [
            LayerPages(f"layers.{i}", raw[:, i], i * layer_bytes, group=0, pages=1, writes=True)
            for i in range(LAYERS)
        ]
        caches = [self.pool[:, i] for i in range(LAYERS)]
        self.runtime: DenseGpuRuntime = dense_runtime(plan(**changes), layers, caches, SIZES, DIM**-0.5)

    @property
    def tables(self) -> DenseTables:
        return self.runtime.tables

    def address(self, block: int) -> int:
        return self.arena[block].data_ptr()

    def lose(self, req_id: str, blocks: list[int]) -> None:
        """From now on only the arena has them."""
        self.tables.add(req_id, [(block, self.address(block)) for block in blocks])
        for block in blocks:
            self.pool[block + 1] = 99.0

    @property
    def block_table(self) -> torch.Tensor:
        return torch.arange(1, BLOCKS + 1, dtype=torch.int32).unsqueeze(0)

    def picked(self, layer: int, length: int) -> list[torch.Tensor]:
        """Per KV head the pieces that one row of this length attends to."""
        host = self.runtime.layers[f"layers.{layer}"]
        query = torch.ones((1, HEADS * GROUP, DIM), dtype=torch.bfloat16)
        lists = host.pick(query, torch.tensor([length], dtype=torch.int32), self.block_table)
        counts = [-(-int(n) // TOKENS) for n in lists.lengths]
        return [host.pages[lists.table[row, :count].long(), :, 0] for row, count in enumerate(counts)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_request_that_has_lost_nothing_attends_to_all_where_it_is_told_to() -> None:
    engine = Engine(exact_in_pool=True)
    engine.tables.begin("a", list(range(14, 20)))
    engine.tables.filled("a", 0, [block + 1 for block in range(9)])
    assert engine.runtime.begin([BatchRow("a", 150, 1)]) == 9
    assert not engine.runtime.differs
    for layer in range(LAYERS):
        for head, pieces in enumerate(engine.picked(layer, 151)):
            assert torch.equal(pieces, engine.arena[:10, layer, head])


def test_it_picks_from_the_start(engine: Engine) -> None:
    engine.tables.begin("a", list(range(14, 20)))
    engine.tables.filled("a", 0, [block + 1 for block in range(9)])
    engine.runtime.begin([BatchRow("a", 150, 1)])
    assert engine.runtime.differs
    assert all(len(pieces) == 5 for pieces in engine.picked(0, 151))


def test_lost_blocks_are_read_from_the_arena(engine: Engine) -> None:
    engine.tables.begin("a", list(range(14, 20)))
    engine.tables.filled("a", 0, [block + 1 for block in range(9)])
    engine.runtime.begin([BatchRow("a", 149, 1)])
    engine.lose("a", [0, 1, 2, 3, 4, 5, 6])
    assert engine.runtime.begin([BatchRow("a", 150, 1)]) == 0, "summaries are made once"
    assert engine.runtime.differs
    for layer in range(LAYERS):
        for head, pieces in enumerate(engine.picked(layer, 151)):
            known = engine.arena[:, layer, head]
            found = [next(b for b in range(BLOCKS) if torch.equal(known[b], piece)) for piece in pieces]
            assert len(found) == 5
            assert found == sorted(found)
            assert (found[0], found[-2:]) == (0, [8, 9])


def test_blocks_of_the_store_get_their_summaries_from_there(engine: Engine) -> None:
    engine.tables.begin("a", list(range(14, 20)))
    engine.lose("a", list(range(8)))
    assert engine.runtime.begin([BatchRow("a", 128, 3)]) == 8
    selector = make_selector("part-means", DIM, TOKENS)
    page = engine.tables.blocks.page[1 if int(engine.tables.blocks.page[1, 0]) >= 0 else 0]
    for layer in range(LAYERS):
        summaries = engine.runtime.layers[f"layers.{layer}"].blocks.summaries
        for block in range(8):
            keys = engine.arena[block, layer, :, :, :DIM].transpose(0, 1).unsqueeze(0)
            wanted = selector.summarise(keys)[0]
            torch.testing.assert_close(summaries[:, int(page[block])].float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_prompt_gets_its_whole_context(engine: Engine) -> None:
    """Some of it in the pool, some in the arena; and beside it one that decodes, and one all in the pool."""
    engine.tables.begin("a", list(range(14, 20)))
    engine.lose("a", [0, 2, 3])
    batch = [BatchRow("d", 20, 1), BatchRow("p", 0, 30), BatchRow("a", 100, 40)]
    engine.runtime.begin(batch)
    assert engine.runtime.decodes == 1
    pooled, staged = engine.runtime.prefill_parts()
    assert (pooled.rows, pooled.tokens, pooled.staged) == (slice(1, 2), slice(1, 31), None)
    assert (staged.rows, staged.tokens, staged.longest) == (slice(2, 3), slice(31, 71), 140)
    assert staged.lengths.tolist() == [140]
    table = torch.zeros((3, BLOCKS), dtype=torch.int32)
    table[2] = engine.block_table[0]
    for layer in range(LAYERS):
        cache = engine.runtime.layers[f"layers.{layer}"].stage(staged, table)
        assert staged.staged is not None
        whole = cache[staged.staged.table[0].long()]
        assert torch.equal(whole, engine.arena[:9, layer])


def test_an_idle_engine_has_no_rows(engine: Engine) -> None:
    engine.tables.begin("a", list(range(14, 20)))
    engine.lose("a", [0])
    engine.runtime.begin([BatchRow("a", 100, 1)])
    assert engine.tables.blocks.row_slot[0] >= 0
    engine.runtime.idle()
    assert not engine.runtime.differs
    assert (engine.tables.blocks.row_slot == -1).all()
    assert engine.runtime.prefill_parts() == []


def test_blocks_that_the_kernels_cannot_summarise_are_refused_at_the_start() -> None:
    layer = LayerPages("a", torch.zeros((2, 8), dtype=torch.uint8), 0, group=0, pages=1, writes=True)
    cache = torch.zeros((2, HEADS, 512, 2 * DIM), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="choose smaller blocks"):
        dense_runtime(plan(block_tokens=512), [layer], [cache], replace(SIZES, layers=1), 1.0)


def test_tables_are_used_again(engine: Engine) -> None:
    tables = engine.tables
    for turn in range(5):
        tables.begin("a", list(range(14, 20)))
        tables.begin("b", list(range(14, 20)))
        with pytest.raises(RuntimeError, match="no table slot"):
            tables.begin("c", [])
        tables.filled("a", 0, [1, 2, 3])
        engine.runtime.begin([BatchRow("a", 48 + turn, 1)])
        tables.add("a", [(1, engine.address(1))])
        with pytest.raises(RuntimeError, match="already"):
            tables.add("a", [(1, engine.address(1))])
        engine.runtime.begin([BatchRow("a", 48 + turn, 1)])
        tables.end("a")
        tables.end("b")
        tables.end("b")
        engine.runtime.begin([])
    assert tables.unsummarised == 0
    tables.begin("a", list(range(14, 20)))
    tables.set_rows(["a"])
    tables.flush()
    assert (tables.blocks.page == -1)[0].all() or (tables.blocks.page == -1)[1].all()


def test_what_finds_no_room_for_a_summary_is_counted(engine: Engine) -> None:
    engine.tables.begin("a", list(range(14, 20)))
    engine.tables.filled("a", 0, list(range(1, 12)))
    engine.tables.begin("b", list(range(14, 20)))
    engine.tables.filled("b", 0, list(range(1, 12)))
    assert engine.tables.unsummarised == 2
    engine.lose("b", [9])
    assert engine.runtime.begin([BatchRow("b", 176, 1)]) == 20
    engine.tables.end("a")
    assert engine.runtime.begin([BatchRow("b", 177, 1)]) == 2, "they get one as soon as there is room"
    assert engine.tables.unsummarised == 2
    assert engine.runtime.begin([BatchRow("b", 178, 1)]) == 0


# The scheduler's half


class Scheduler:
    """DenseScheduler's knowledge of requests, without an engine."""

    def __init__(self) -> None:
        self.half = object.__new__(DenseScheduler)
        self.half.block_tokens = TOKENS
        self.half._hosts = Hosts()
        self.blocks: dict[str, list[int]] = {}

    def add(self, req_id: str, found: int = 0) -> Host:
        request: Request = SimpleNamespace(request_id=req_id, num_computed_tokens=found * TOKENS)  # type: ignore[assignment]
        host = self.half._hosts[req_id] = Host(request, 100)
        host.found([SlotRef(i, 1) for i in range(found)], 1, [])
        self.blocks[req_id] = [0] * found
        return host

    def step(self, **scheduled: int) -> list[HostFilled]:
        orders = StepOrders()
        self.half._tell_of_filled(scheduled, lambda req_id: (self.blocks[req_id],), orders)
        for req_id, tokens in scheduled.items():
            self.half._hosts[req_id].request.num_computed_tokens += tokens
        return orders.host_filled


def test_blocks_are_told_of_in_the_step_after_they_fill() -> None:
    scheduler = Scheduler()
    host = scheduler.add("a")
    host.told = True
    scheduler.blocks["a"] = [7, 8, 9]
    assert scheduler.step(a=40) == []
    scheduler.blocks["a"] = [0, 0, 9]  # released, and maybe another's: the next forward has not run
    assert scheduler.step(a=7) == [HostFilled("a", 0, (7, 8))]
    assert scheduler.step(a=1) == []
    assert scheduler.step() == [HostFilled("a", 2, (9,))]
    assert scheduler.step() == []


def test_a_request_that_becomes_host_backed_later_is_told_of_whole() -> None:
    scheduler = Scheduler()
    host = scheduler.add("a")
    scheduler.blocks["a"] = list(range(5, 15))
    assert scheduler.step(a=100) == []
    host.told = True
    assert scheduler.step(a=1) == [HostFilled("a", 0, tuple(range(5, 11)))]


def test_blocks_of_the_store_are_not_told_of() -> None:
    scheduler = Scheduler()
    host = scheduler.add("a", found=4)
    host.told = True
    scheduler.blocks["a"] += [3, 4]
    assert scheduler.step(a=20) == []
    assert scheduler.step(a=1) == [HostFilled("a", 4, (3,))]
