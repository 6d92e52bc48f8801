"""The stand-in for FlashAttention: which path a batch takes, and that all of them attend to what they should.

A CPU has no FlashAttention: its place is taken by the same attention over the same block tables in torch. The
real one runs in tests/gpu/test_dense.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsieve_connector import plugin
from kvsieve_connector.sparse.runtime import BatchRow
from tests.unit.test_dense_gpu import DIM, GROUP, HEADS, LAYERS, TOKENS, Engine

SCALE = DIM**-0.5


def paged_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    **_: Any,
) -> None:
    """q: [tokens, heads, dim]; k, v: [pages, N, KV heads, dim]; causal, to the end of each context."""
    for row, (begin, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        length = int(seqused_k[row])
        pages = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (side[pages].flatten(0, 1)[:length] for side in (k, v))
        out[begin:end] = exact(q[begin:end], keys, values, softmax_scale)


def exact(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q: [tokens, heads, dim], the last of keys and values, [context, KV heads, dim]."""
    tokens, context, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(group, dim=1).float().transpose(0, 1) for side in (keys, values))
    logits = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    hidden = ~torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
    found = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return found.transpose(0, 1).to(q.dtype)


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    from vllm.v1.attention.backends import fa_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa_utils, "flash_attn_varlen_func", paged_attention, raising=False)
        patch.setattr(fa_utils, "get_scheduler_metadata", lambda **_: torch.zeros(1), raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        from kvsieve_connector.dense.gpu import backend

        yield backend


@pytest.fixture
def stock_calls(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of vLLM's own implementation."""
    calls: list[Any] = []
    monkeypatch.setattr(backend.FlashAttentionImpl, "forward", lambda _, *args: calls.append(args))
    return calls


def implementation(backend: Any, engine: Engine, layer: int) -> Any:
    impl = object.__new__(backend.HostFlashAttentionImpl)
    impl.__dict__.update(
        num_kv_heads=HEADS, head_size=DIM, scale=SCALE, logits_soft_cap=0, vllm_flash_attn_version=3
    )
    impl.host = engine.runtime.layers[f"layers.{layer}"]
    return impl


def forward(backend: Any, engine: Engine, layer: int, rows: list[BatchRow], **more: Any) -> Any:
    """Runs a batch of which each row has the engine's context; returns query and output."""
    counts = [row.scheduled for row in rows]
    generator = torch.Generator().manual_seed(layer)
    query = torch.randn((sum(counts), HEADS * GROUP, DIM), generator=generator).to(torch.bfloat16)
    output = torch.zeros_like(query)
    metadata = SimpleNamespace(
        num_actual_tokens=len(query),
        max_query_len=max(counts),
        seq_lens=torch.tensor([row.computed + row.scheduled for row in rows], dtype=torch.int32),
        block_table=engine.block_table.repeat(len(rows), 1),
        max_num_splits=0,
    )
    impl = implementation(backend, engine, layer)
    cache = engine.pool[:, layer]
    impl.forward(None, query, None, None, cache, metadata, output, *more.values())
    return query, output


def context(engine: Engine, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values: [length, KV heads, dim]."""
    tokens = engine.arena[:, layer].transpose(1, 2).flatten(0, 1)[:length]
    return tokens[..., :DIM], tokens[..., DIM:]


def test_the_plug_in_names_it(backend: Any) -> None:
    module, _, name = plugin.FLASH_BACKEND.rpartition(".")
    assert module == backend.__name__
    assert getattr(backend, name).get_name() == "FLASH_ATTN"


def test_a_batch_that_is_all_in_the_pool_is_vllms(backend: Any, stock_calls: list[Any]) -> None:
    engine = Engine()
    rows = [BatchRow("a", 100, 1)]
    engine.runtime.begin(rows)
    forward(backend, engine, 0, rows)
    assert len(stock_calls) == 1


def test_scaled_outputs_are_left_to_vllm_to_refuse(backend: Any, stock_calls: list[Any]) -> None:
    engine = Engine()
    engine.tables.begin("a", list(range(14, 20)))
    engine.lose("a", [0])
    rows = [BatchRow("a", 100, 1)]
    engine.runtime.begin(rows)
    forward(backend, engine, 0, rows, output_scale=torch.ones(1))
    ((*_, scale, _),) = stock_calls
    assert scale is not None


def test_a_prompt_attends_to_all_of_its_context(backend: Any, stock_calls: list[Any]) -> None:
    """Beside one that is wholly in the pool."""
    engine = Engine()
    engine.tables.begin("a", list(range(14, 20)))
    lost = [0, 2, 3]
    engine.tables.add("a", [(block, engine.address(block)) for block in lost])
    rows = [BatchRow("p", 0, 30), BatchRow("a", 100, 40)]
    engine.runtime.begin(rows)
    for layer in range(LAYERS):
        query, output = forward(backend, engine, layer, rows)
        for tokens, length in ((slice(0, 30), 30), (slice(30, 70), 140)):
            wanted = exact(query[tokens], *context(engine, layer, length), SCALE)
            torch.testing.assert_close(output[tokens], wanted, rtol=2e-2, atol=2e-2)
    assert not stock_calls


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_a_decode_step_attends_to_what_it_picks(backend: Any, stock_calls: list[Any], beside: bool) -> None:
    engine = Engine()
    engine.tables.begin("a", list(range(14, 20)))
    engine.tables.filled("a", 0, [block + 1 for block in range(9)])
    engine.runtime.begin([BatchRow("a", 149, 1)])
    engine.lose("a", [0, 1, 2, 3, 4, 5, 6])
    if beside:  # a prompt over the same context, which is not all in the pool either
        engine.tables.begin("p", list(range(14, 20)))
        engine.tables.add("p", [(block, engine.address(block)) for block in range(7)])
    rows = [BatchRow("a", 150, 1), *[BatchRow("p", 140, 10)] * beside]
    engine.runtime.begin(rows)
    for layer in range(LAYERS):
        query, output = forward(backend, engine, layer, rows)
        host = engine.runtime.layers[f"layers.{layer}"]
        lists = host.pick(query[:1], torch.tensor([151], dtype=torch.int32), engine.block_table)
        assert lists.lengths.tolist() == [engine.runtime.picks.listed * TOKENS + 7] * HEADS
        for head in range(HEADS):
            pieces = host.pages[lists.table[head, :5].long()].flatten(0, 1)[: int(lists.lengths[head])]
            some = slice(head * GROUP, (head + 1) * GROUP)
            wanted = exact(query[:1, some], pieces[..., :DIM], pieces[..., DIM:], SCALE)
            torch.testing.assert_close(output[:1, some], wanted, rtol=2e-2, atol=2e-2)
        if beside:
            keys, values = context(engine, layer, 150)
            wanted = exact(query[1:], keys, values, SCALE)
            torch.testing.assert_close(output[1:], wanted, rtol=2e-2, atol=2e-2)
    assert not stock_calls
