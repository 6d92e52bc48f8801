"""The numbers of sparse mode on a dense model, and what it refuses to start on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from kvsieve_connector.dense.check import check_config
from kvsieve_connector.dense.plan import DensePlan, tell
from kvsieve_connector.dense.selectors import SELECTORS
from kvsieve_connector.kernels import block_tables
from kvsieve_connector.settings import SelectorName
from kvsieve_connector.sparse.plan import is_dense
from kvsieve_connector.sparse.spec import HostBackedSpec, as_host_backed
from tests.unit.test_sparse_plan import engine as dsa_engine


def engine(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A configuration of a Llama in sparse mode; changes: cache_dtype, speculative, connector, device, v2,
    ubatching, prefix_lm."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=changes.get("connector", "KVSieveConnector"),
            kv_connector_extra_config={"kvsieve.mode": "sparse"} | (extra or {}),
        ),
        model_config=SimpleNamespace(
            model="some/model",
            max_model_len=8000,
            hf_text_config=SimpleNamespace(num_hidden_layers=4),
            is_mm_prefix_lm=changes.get("prefix_lm", False),
        ),
        cache_config=SimpleNamespace(block_size=32, cache_dtype=changes.get("cache_dtype", "auto")),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        speculative_config=changes.get("speculative"),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        use_v2_model_runner=changes.get("v2", False),
        parallel_config=SimpleNamespace(use_ubatching=changes.get("ubatching", False)),
    )


FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
BACKED = as_host_backed(HostBackedSpec, FULL, DensePlan.of_config(engine()))
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=128
)


def cache(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_the_defaults() -> None:
    plan = DensePlan.of_config(engine())
    assert (plan.budget_blocks, plan.first_blocks, plan.window_blocks, plan.dense_layers) == (32, 1, 2, 0)
    assert (plan.hot_blocks, plan.attended_blocks, plan.max_blocks) == (0, 35, 250)
    assert plan.selector in SELECTORS


def test_pools_are_shared_by_those_that_pick_alike() -> None:
    """Keys and values of what is decoded are approximate, too: the names of how differ."""
    own = [
        engine(),
        engine({"kvsieve.selector": "mean-outlier"}),
        engine({"kvsieve.budget_tokens": 512}),
        engine({"kvsieve.first_blocks": 0}),
        engine({"kvsieve.window_blocks": 3}),
        engine({"kvsieve.dense_layers": 1}),
        gpu({"kvsieve.exact_in_pool": True}),
    ]
    assert len({DensePlan.of_config(each).attention for each in own}) == len(own)
    assert DensePlan.of_config(engine()).attention == "part-means/8 32+1+2 of 32 dense 0"
    assert (
        DensePlan.of_config(gpu({"kvsieve.hot_rows": 9000})).attention == DensePlan.of_config(gpu()).attention
    )


def test_a_budget_is_whole_blocks() -> None:
    assert DensePlan.of_config(engine({"kvsieve.budget_tokens": 33})).budget_blocks == 2
    assert DensePlan.of_config(engine({"kvsieve.budget_tokens": 0})).budget_blocks == 0


def test_the_arena_alone_bounds_what_is_read_from_it() -> None:
    plan = DensePlan.of_config(engine())
    assert plan.table_slots(10, 1, 8) >= 8
    assert plan.pages(10) > 8 * 250


def gpu(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    return engine(extra, device="cuda", v2=True, **changes)


def test_on_a_gpu_a_request_has_a_hot_buffer() -> None:
    plan = DensePlan.of_config(gpu())
    assert plan.attended_blocks == 35
    assert plan.hot_blocks == 70
    assert DensePlan.of_config(gpu({"kvsieve.hot_rows": 35 * 32})).hot_blocks == 35
    assert plan.table_slots(700, 1, 8) == 10
    assert plan.table_slots(100_000, 1, 8) >= 8


@pytest.mark.parametrize(
    ("config", "when"),
    [
        (engine(), "once a request has blocks that only the arena has"),
        (gpu(), "once a request has 2240 tokens below its newest blocks, or 1120 and begins in the store"),
        (gpu({"kvsieve.exact_in_pool": True}), "once a request has blocks that only the arena has"),
    ],
    ids=["cpu", "gpu", "exact in the pool"],
)
def test_the_log_says_when_attention_becomes_approximate(
    config: Any, when: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    tell(DensePlan.of_config(config))
    assert f"{when}, its decode steps attend to a part of the context only" in caplog.text
    assert "1024 tokens that 'part-means' picks" in caplog.text


def test_on_a_gpu_summaries_bound_what_is_in_the_arena() -> None:
    assert DensePlan.of_config(gpu()).host_tokens == 8 * 8000
    plan = DensePlan.of_config(gpu({"kvsieve.host_tokens": 3200}))
    assert plan.pages(10) == 101
    assert plan.summary_pages >= plan.pages(10) + 2 * 512 // 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gpu({"kvsieve.hot_rows": 1000}), "hot_rows: 1000 given, at least 1120"),
        (gpu({"kvsieve.dense_layers": 1}), "dense_layers"),
        (gpu({"kvsieve.prefetch": "none"}), "prefetch"),
        (engine({"kvsieve.hot_rows": 2000}), "hot_rows given, which means nothing on a CPU"),
        (engine({"kvsieve.host_tokens": 2000}), "host_tokens given, which means nothing on a CPU"),
    ],
    ids=["few hot rows", "dense layers", "prefetch", "hot rows on a CPU", "host tokens on a CPU"],
)
def test_settings_that_do_not_fit_the_device(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DensePlan.of_config(config)


def test_settings_name_the_selectors_that_there_are() -> None:
    assert set(get_args(SelectorName)) == SELECTORS.keys() == block_tables.SELECTORS.keys()


def test_the_spec_keeps_the_layers_cache() -> None:
    assert BACKED.page_size_bytes == FULL.page_size_bytes
    assert (BACKED.hot_blocks, BACKED.window_blocks, BACKED.sliding_window) == (0, 2, 64)
    assert not BACKED.prefix_cacheable
    assert BACKED.max_admission_blocks_per_request(256, 8000) == 2 + 8 + 1


def test_a_model_with_a_latent_is_not_dense() -> None:
    assert is_dense(engine())
    assert not is_dense(dsa_engine())


def test_a_dense_model_as_planned_is_accepted() -> None:
    check_config(engine(), cache(BACKED))


@pytest.mark.parametrize(
    ("extra", "changes", "specs", "message"),
    [
        ({"kvsieve.hot_rows": 64}, {}, [BACKED], "hot_rows given, which means nothing on a CPU"),
        ({"kvsieve.prefetch": "none"}, {}, [BACKED], "prefetch given, which means nothing"),
        ({"kvsieve.save_decode": False}, {}, [BACKED], "save_decode=false given, .* requires true"),
        ({"kvsieve.dense_layers": 5}, {}, [BACKED], "dense_layers: 5 given, the model has 4 layers"),
        ({}, {"connector": "MultiConnector"}, [BACKED], "can't be combined with MultiConnector"),
        ({}, {"cache_dtype": "fp8"}, [BACKED], "kv_cache_dtype='fp8' is not supported"),
        ({}, {"speculative": object()}, [BACKED], "does not support speculative decoding"),
        ({}, {"device": "xpu"}, [BACKED], "runs on CPUs and NVIDIA GPUs, this engine is on 'xpu'"),
        ({}, {"v2": True}, [BACKED], "on cpu needs vLLM's V1 model runner"),
        ({}, {"device": "cuda"}, [BACKED], "on cuda needs vLLM's V2 model runner"),
        ({}, {"device": "cuda", "v2": True}, [FULL], "backend FLASH_ATTN in all layers"),
        ({}, {"prefix_lm": True}, [BACKED], "prefix-LM"),
        ({}, {"ubatching": True}, [BACKED], "--enable-dbo"),
        ({}, {}, [FULL], r"layers\.0\.attn keeps a FullAttentionSpec \(1 layers like it\)"),
        ({}, {}, [BACKED, WINDOW], r"layers\.1\.attn attends to a window of 128 tokens"),
        ({}, {}, [BACKED, BACKED], "needs one KV group, this model has 2"),
    ],
)
def test_what_it_refuses(
    extra: dict[str, Any], changes: dict[str, Any], specs: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(engine(extra, **changes), cache(*specs))


@pytest.mark.parametrize(
    "name", ["budget_tokens", "first_blocks", "dense_layers", "host_tokens", "exact_in_pool"]
)
def test_what_means_nothing_for_a_dsa_model_is_refused_there(name: str) -> None:
    from kvsieve_connector.sparse.plan import SparsePlan

    with pytest.raises(ValueError, match=f"{name} given, which means nothing for models with DeepSeek"):
        SparsePlan.of_config(dsa_engine({f"kvsieve.{name}": 1}))
