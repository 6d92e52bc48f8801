"""A worker half of sparse mode on CPU tensors, planned by vLLM, and a session with a real store."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from kvsieve_connector.metadata import HostBacked, HostBlocks, SaveOrder, StepOrders
from kvsieve_connector.settings import parse_settings
from kvsieve_connector.sparse.attention import HostBackedAttention
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.worker import SparseWorkerHalf
from kvsieve_store.client import Attachment, StoreClient
from kvsieve_store.protocol.spec import PoolSpec
from tests.conftest import StoreProcess
from tests.engine.sparse_vllm import BLOCK, ROW_BYTES, plan_cache, scene_config

LAYERS, HOT_BLOCKS, SEQS = 4, 2, 3
MAX_MODEL_LEN = 1000
"""Fifteen blocks, and a part of one."""


def engine_config(**changes: Any) -> Any:
    """What a worker half reads of vLLM's configuration. indexers: the layers that have their own.
    num_hidden_layers: of the model, if it says so; the others are a drafter's."""
    config = scene_config(HOT_BLOCKS, 256, 1, SEQS, MAX_MODEL_LEN)
    if changes.get("num_hidden_layers") is not None:
        config.model_config.hf_text_config.num_hidden_layers = changes["num_hidden_layers"]
    indexers = changes.get("indexers", range(LAYERS))
    layers = {
        f"layers.{i}.attn": SimpleNamespace(
            impl=HostBackedAttention(), indexer="its own" if i in indexers else None
        )
        for i in range(LAYERS)
    }
    config.compilation_config = SimpleNamespace(
        static_forward_context=layers, cudagraph_capture_sizes=changes.get("graphs", [1, 8])
    )
    config.parallel_config.data_parallel_size = changes.get("data_parallel_size", 1)
    return config


class Worker:
    """half: the worker half. caches: layer -> uint8 [num_blocks, BLOCK, row bytes] of the paged cache."""

    def __init__(self, prefetch: str | None = None, **changes: Any) -> None:
        settings = parse_settings(
            {
                "kvsieve.mode": "sparse",
                "kvsieve.hot_rows": HOT_BLOCKS * BLOCK,
                "kvsieve.window_blocks": 1,
                "kvsieve.endpoint": "unix:///s",
            }
            | ({"kvsieve.prefetch": prefetch} if prefetch else {})
        )
        config = engine_config(**changes)
        self.plan = SparsePlan.of(config, settings)
        self.cache = plan_cache(config, LAYERS, 4 << 20, self.plan)
        self.half = SparseWorkerHalf(config, self.cache, settings)
        self.caches = self._allocate()
        self.half.register(self.caches)

    def _allocate(self) -> dict[str, torch.Tensor]:
        """As vLLM's runner does."""
        memory = torch.zeros(max(t.size for t in self.cache.kv_cache_tensors), dtype=torch.uint8)
        caches = {}
        for tensor in self.cache.kv_cache_tensors:
            for order, name in enumerate(tensor.layers):
                row = 132 if ".indexer." in name else ROW_BYTES
                start = tensor.offset + order * tensor.layer_stride
                shape = (self.cache.num_blocks, BLOCK, row)
                caches[name] = memory.as_strided(shape, (tensor.block_stride, row, 1), start)
        return caches

    @property
    def runtime(self) -> Any:
        return self.half._runtime

    @property
    def tables(self) -> Any:
        return self.runtime.tables

    def page(self, name: str) -> list[bool]:
        """Per block of the request, whether the device reads it from the arena."""
        return [bool(number) for number in self.tables.requests.page[self.tables.slot(name)].tolist()]

    def step(self, orders: StepOrders | None = None, /, **batch: tuple[int, int]) -> None:
        """One step, in the order in which vLLM calls. batch: request -> (computed, scheduled) tokens."""
        self.half.begin(orders or StepOrders())
        self.half.prepare_forward(forward(**batch) if batch else {})
        self.half.start_loads()
        self.half.finish_saves(after_sampling=True)
        self.half.results()

    def save(self, block: int, slot: int) -> StepOrders:
        """Orders to copy a block: in KV group g, `block + g`."""
        groups = range(len(self.cache.kv_cache_groups))
        pages = tuple((block + group,) for group in groups)
        return StepOrders(saves=[SaveOrder(job=slot, slot=slot, pages=pages)])

    def swap_in(self, layer: int, positions: list[int], blocks: int = 15) -> torch.Tensor:
        """Where the rows of these positions are for the first request of the batch: int64 [positions]."""
        name = f"layers.{layer}.attn"
        topk = torch.full((1, self.plan.topk), -1, dtype=torch.int32)
        topk[0, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
        table = torch.zeros(1, blocks, dtype=torch.int32)
        rows, _ = self.runtime.layers[name].swap_in(topk, table, BLOCK)
        return rows[0, : len(positions)].long()

    def rows(self, layer: int, found: torch.Tensor) -> torch.Tensor:
        """What is there: uint8 [positions, ROW_BYTES]."""
        return self.caches[f"layers.{layer}.attn"][found // BLOCK, found % BLOCK]

    def read(self, layer: int, positions: list[int]) -> torch.Tensor:
        """swap_in and rows."""
        return self.rows(layer, self.swap_in(layer, positions))


def forward(finished: tuple[str, ...] = (), /, **batch: tuple[int, int]) -> dict[str, Any]:
    """What vLLM's V2 runner gives to start_load_kv. The first request is new, the others run."""
    new, *running = batch
    output = SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=new, num_computed_tokens=batch[new][0])],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=running, num_computed_tokens=[batch[name][0] for name in running]
        ),
        num_scheduled_tokens={name: scheduled for name, (_, scheduled) in batch.items()},
    )
    return {"request_ids": list(batch), "scheduler_output": output}


def connect(store: StoreProcess, worker: Worker) -> StoreClient:
    """A session with the store, for blocks of the worker's shape."""
    handshake = worker.half.handshake()
    assert handshake is not None
    spec = PoolSpec(
        name="m",
        model="m",
        dtype="fp8",
        block_tokens=BLOCK,
        hash_algo="sha256",
        hash_seed="",
        layout=handshake.geometry.layout,
        tp_size=1,
        planes=handshake.geometry.planes(1),
    )
    client = StoreClient(store.endpoint, spec, engine_id="e", credit_target=8)
    client.start()
    client.wait_attached(20)
    return client


def hot(first: int) -> tuple[tuple[int, ...], ...]:
    """Hot blocks of a request in each main group, from block `first` on."""
    return tuple(tuple(range(first + 2 * g, first + 2 * g + HOT_BLOCKS)) for g in range(LAYERS))


def backed(epoch: int, *blocks: tuple[int, int], name: str = "a", first: int = 20) -> StepOrders:
    """A request becomes host-backed, and these blocks of it (index, slot) are read from the arena."""
    return StepOrders(
        host_backed=[HostBacked(name, hot(first))], host_blocks=[HostBlocks(name, epoch, tuple(blocks))]
    )


def saved(worker: Worker, client: StoreClient, attachment: Attachment) -> tuple[int, list[torch.Tensor]]:
    """A slot to which a block was copied, and what each main layer had in it; the GPU has it no more."""
    (ref,) = client.take_credits(1, epoch=attachment.epoch)
    pages = [worker.caches[f"layers.{layer}.attn"][5 + layer] for layer in range(LAYERS)]
    for page in pages:
        page.random_(256)
    worker.step(worker.save(5, ref.slot))
    report = worker.half.report()
    assert report is not None
    assert report.saved == {ref.slot: 1}
    rows = [page.clone() for page in pages]
    for page in pages:
        page.fill_(0xFF)
    return ref.slot, rows


def numbered(attachment: Attachment, epoch: int) -> Attachment:
    """As the one client of an engine would number its next session."""
    return replace(attachment, epoch=epoch)
