"""Attention of a mixed batch over blocks in the pool and in the arena, against torch over what is picked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

from kvsieve_connector.copy.base import LayerPages
from kvsieve_connector.dense.backend import HostCPUAttentionImpl
from kvsieve_connector.dense.packing import key_order
from kvsieve_connector.dense.pages import Pages
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.dense.runtime import DenseRuntime
from kvsieve_connector.dense.selectors import DEFAULT, make_selector, select
from kvsieve_connector.metadata import HostRow

BLOCK, HEADS, GROUP, DIM, LAYERS = 32, 2, 3, 32, 2
DTYPE, SELECTOR = torch.float32, DEFAULT
ISA = _get_attn_isa(DTYPE, BLOCK, DIM)
SCALE = DIM**-0.5


@dataclass
class Asked:
    """A request. new: tokens of the step. away: its blocks in the arena. decodes: as in HostRow."""

    length: int
    new: int
    away: set[int]
    decodes: bool


@pytest.fixture(scope="module")
def impl(tiny_qwen3: Path) -> Any:
    return _impl(tiny_qwen3, HEADS)


@pytest.fixture(scope="module")
def rank_impl(tiny_qwen3: Path) -> Any:
    """Of a rank with one KV head."""
    return _impl(tiny_qwen3, 1)


def _impl(model: Path, heads: int) -> Any:
    config = VllmConfig(model_config=ModelConfig(str(model), dtype="float32"))
    with set_current_vllm_config(config):
        return HostCPUAttentionImpl(heads * GROUP, DIM, SCALE, heads, None, None, "auto")


@st.composite
def _batches(draw: st.DrawFn) -> list[Asked]:
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 12 * BLOCK))
        decodes = draw(st.booleans())
        new = 1 if decodes else draw(st.integers(1, min(length, 50)))
        full = (length - new) // BLOCK
        away = draw(st.sets(st.integers(0, max(full - 1, 0)), max_size=full)) if full else set()
        batch.append(Asked(length, new, away, decodes))
    return batch


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=_batches(),
    budget=st.integers(0, 4),
    first=st.integers(0, 2),
    dense=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_attention_is_that_over_what_is_picked(
    impl: Any, batch: list[Asked], budget: int, first: int, dense: int, seed: int
) -> None:
    plan = DensePlan(
        block_tokens=BLOCK,
        budget_blocks=budget,
        first_blocks=first,
        window_blocks=1,
        selector=SELECTOR,
        dense_layers=dense,
        max_blocks=13,
        max_num_seqs=4,
    )
    scene = Scene(impl, plan, batch, seed)
    for layer in range(LAYERS):
        found, wanted = scene.attend(layer), scene.reference(layer)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_pick_and_attend_as_one_does(impl: Any, rank_impl: Any, seed: int) -> None:
    """Each with its half of the heads: a KV head's picks depend on no other head."""
    plan = DensePlan(
        block_tokens=BLOCK,
        budget_blocks=2,
        first_blocks=1,
        window_blocks=1,
        selector=SELECTOR,
        dense_layers=1,
        max_blocks=13,
        max_num_seqs=4,
    )
    batch = [
        Asked(11 * BLOCK + 5, 1, {*range(9)}, True),
        Asked(8 * BLOCK, 1, {1, 4}, True),
        Asked(6 * BLOCK + 1, 20, {0, 2, 3}, False),
        Asked(90, 1, set(), True),
    ]
    whole = Scene(impl, plan, batch, seed)
    ranks = [Scene(rank_impl, plan, batch, seed, range(head, head + 1)) for head in range(HEADS)]
    for layer in range(LAYERS):
        wanted = whole.attend(layer)
        found = torch.cat([rank.attend(layer) for rank in ranks], dim=1)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    counts, apart = whole.runtime.take_counts(), [rank.runtime.take_counts() for rank in ranks]
    for name in ("asked_pieces", "pool_pieces", "arena_pieces", "arena_read_bytes"):
        assert counts[name] == sum(each[name] for each in apart) > 0


class Scene:
    """The batch's keys and values, in a pool and an arena that hold garbage everywhere else. heads: the KV
    heads of this rank, and the query heads that go with them."""

    def __init__(
        self, impl: Any, plan: DensePlan, batch: list[Asked], seed: int, heads: range = range(HEADS)
    ) -> None:
        torch.manual_seed(seed)
        self.heads = len(heads)
        self.impl, self.plan, self.batch = impl, plan, batch
        counts = [-(-asked.length // BLOCK) for asked in batch]
        blocks = sum(counts) + 1
        own = slice(heads.start, heads.stop)
        self.kv = [torch.randn(LAYERS, 2, asked.length, HEADS, DIM)[..., own, :] for asked in batch]
        query = torch.randn(LAYERS, sum(asked.new for asked in batch), HEADS, GROUP, DIM)
        self.query = query[:, :, own].flatten(2, 3)
        shuffled = (torch.randperm(blocks - 1) + 1).tolist()
        self.tables = [[shuffled.pop() for _ in range(count)] for count in counts]
        self.pool = torch.full((LAYERS, blocks, self.heads, BLOCK, 2 * DIM), 1e3)
        for layer in range(LAYERS):
            self._write(layer)
        page = self.pool[0, 0].numel()
        self.arena = self.pool.transpose(0, 1).reshape(blocks, LAYERS * page).clone()
        views = [self.pool[layer].view(blocks, page).view(torch.uint8) for layer in range(LAYERS)]
        layers = [LayerPages(str(i), view, i * page * 4, 0, 1, True) for i, view in enumerate(views)]
        selector = make_selector(SELECTOR, DIM, BLOCK, SCALE)
        order = key_order(ISA, DTYPE, BLOCK, DIM)
        names = [layer.name for layer in layers]
        self.runtime = DenseRuntime(plan, names, Pages(layers, self.heads), selector, order, self.pool[0])
        rows = []
        for number, asked in enumerate(batch):
            if not asked.away:
                continue
            ids = self.tables[number]
            self.runtime.contexts.begin(str(number))
            slots = [(i, self.arena[ids[i]].data_ptr()) for i in sorted(asked.away)]
            self.runtime.contexts.add(str(number), slots)
            for i in asked.away:  # another request has it
                self.pool[:, ids[i]] = -1e3
            rows.append(HostRow(ids[-1], str(number), asked.decodes))
        self.runtime.begin(rows)
        self.metadata = self._metadata()

    def attend(self, layer: int) -> torch.Tensor:
        class Layer:
            layer_name, isa = str(layer), ISA
            _k_scale_float = _v_scale_float = 1.0

        output = torch.zeros_like(self.query[layer])
        self.impl.runtime = self.runtime
        self.impl.forward(Layer, self.query[layer], None, None, self.pool[layer], self.metadata, output)
        return output

    def reference(self, layer: int) -> torch.Tensor:
        outputs, at = [], 0
        for asked, kv in zip(self.batch, self.kv, strict=True):
            query = self.query[layer, at : at + asked.new].view(asked.new, self.heads, GROUP, DIM).double()
            at += asked.new
            keys, values = kv[layer].double()
            logits = torch.einsum("thgd,shd->hgts", query, keys) * SCALE
            last = torch.arange(asked.length - asked.new, asked.length)
            seen = (torch.arange(asked.length) <= last[:, None]).expand(self.heads, 1, -1, -1).clone()
            full = (asked.length - asked.new) // BLOCK
            sparse = asked.away and asked.decodes and layer >= self.plan.dense_layers
            if sparse and full > self.plan.attended_blocks:
                seen[..., : full * BLOCK] = False
                for head, picked in enumerate(self._picked(layer, query[0], kv[layer, 0], full).T.tolist()):
                    for block in picked:
                        seen[head, :, :, block * BLOCK : (block + 1) * BLOCK] = True
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hgts,shd->thgd", weights, values).reshape(asked.new, -1, DIM))
        return torch.cat(outputs).float()

    def _picked(self, layer: int, query: torch.Tensor, keys: torch.Tensor, full: int) -> torch.Tensor:
        selector = make_selector(SELECTOR, DIM, BLOCK, SCALE)
        summaries = selector.summarise(keys[: full * BLOCK].view(full, BLOCK, self.heads, DIM))
        scores = selector.score(query.float(), summaries)
        plan = self.plan
        return select(scores, plan.budget_blocks, plan.first_blocks, plan.window_blocks).expand(
            -1, self.heads
        )

    def _write(self, layer: int) -> None:
        """All requests' keys and values, as vLLM writes them."""
        cache = self.pool[layer].view(-1, self.heads, 2 * BLOCK, DIM)
        key_cache, value_cache = cache.chunk(2, dim=2)
        for kv, ids in zip(self.kv, self.tables, strict=True):
            slots = torch.tensor([ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(kv.shape[2])])
            ops.cpu_attn_reshape_and_cache(
                kv[layer, 0].contiguous(),
                kv[layer, 1].contiguous(),
                key_cache,
                value_cache,
                slots,
                ISA,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype="auto",
            )

    def _metadata(self) -> CPUAttentionMetadata:
        news = torch.tensor([0] + [asked.new for asked in self.batch])
        starts = news.cumsum(0).to(torch.int32)
        lengths = torch.tensor([asked.length for asked in self.batch], dtype=torch.int32)
        table = torch.zeros((len(self.batch), max(map(len, self.tables))), dtype=torch.int32)
        slots = []
        for row, (asked, ids) in enumerate(zip(self.batch, self.tables, strict=True)):
            table[row, : len(ids)] = torch.tensor(ids)
            slots += [
                ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(asked.length - asked.new, asked.length)
            ]
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.batch),
            num_heads=self.heads * GROUP,
            num_kv_heads=self.heads,
            head_dim=DIM,
            seq_lens=lengths,
            dtype=DTYPE,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=ISA,
            enable_kv_split=True,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        most = max(asked.new for asked in self.batch)
        return CPUAttentionMetadata(
            num_actual_tokens=len(slots),
            max_query_len=most,
            query_start_loc=starts,
            max_seq_len=int(lengths.max()),
            seq_lens=lengths,
            block_table=table,
            slot_mapping=torch.tensor(slots),
            scheduler_metadata=schedule,
        )
