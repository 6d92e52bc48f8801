"""The numbers of sparse mode, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsieve_connector.settings import parse_settings
from kvsieve_connector.sparse.plan import SparsePlan, sparse_wanted


def engine(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A configuration of DeepSeek-V3.2 in sparse mode; changes: cache_dtype, speculative, connector, hf."""
    hf = {"index_topk": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64} | changes.get("hf", {})
    given = {"kvsieve.mode": "sparse"} | (extra or {})
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=changes.get("connector", "KVSieveConnector"),
            kv_connector_extra_config=changes.get("outer", given),
        ),
        model_config=SimpleNamespace(
            model="some/model", dtype=torch.bfloat16, hf_text_config=SimpleNamespace(**hf)
        ),
        cache_config=SimpleNamespace(block_size=64, cache_dtype=changes.get("cache_dtype", "fp8")),
        num_speculative_tokens=changes.get("speculative", 0),
    )


def plan(*args: Any, **kwargs: Any) -> SparsePlan:
    return SparsePlan.of_config(engine(*args, **kwargs))


def test_the_defaults() -> None:
    assert plan() == SparsePlan(
        block_tokens=64, topk=2048, query_tokens=1, hot_blocks=48, window_blocks=2, row_bytes=656
    )
    assert plan().hot_rows == 3072
    assert plan().window_tokens == 128


def test_rows_of_sixteen_bits_are_as_wide_as_the_latent() -> None:
    assert plan(cache_dtype="auto").row_bytes == plan(cache_dtype="bfloat16").row_bytes == 1152


def test_speculative_tokens_need_rows_of_their_own() -> None:
    assert plan(speculative=1).hot_rows == 2 * 3072
    with pytest.raises(ValueError, match=r"hot_rows: 3072 given .* 4096 to 32704"):
        plan({"kvsieve.hot_rows": 3072}, speculative=1)


def test_a_step_asks_for_no_more_rows_than_the_swap_in_has_shared_memory_for() -> None:
    assert plan(speculative=6).query_tokens == 7
    with pytest.raises(ValueError, match=r"num_speculative_tokens=7 .* 16384 rows .* allows 15000"):
        plan(speculative=7)


@pytest.mark.parametrize("policy", ["previous-layer", "previous-step+margin"])
def test_no_policy_fetches_across_the_graphs_of_model_and_drafter(policy: str) -> None:
    plan({"kvsieve.prefetch": policy})
    plan({"kvsieve.prefetch": "previous-step"}, speculative=1)
    with pytest.raises(ValueError, match="does not work with speculative decoding"):
        plan({"kvsieve.prefetch": policy}, speculative=1)


def test_steps_of_unequal_tokens_are_refused() -> None:
    config = engine(speculative=1)
    config.speculative_config = SimpleNamespace(enable_adaptive_verification=True)
    with pytest.raises(ValueError, match="enable_adaptive_verification"):
        SparsePlan.of_config(config)


def test_hot_rows_are_whole_blocks() -> None:
    assert plan({"kvsieve.hot_rows": 2049}).hot_blocks == 33
    assert plan({"kvsieve.hot_rows": 32704}).hot_blocks == 511


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"kvsieve.hot_rows": 2047 - 64}, {}, "1983 given .1984 in whole .* 2048 to 32704 allowed"),
        ({"kvsieve.hot_rows": 32705}, {}, "32705 given .32768 in"),
        ({"kvsieve.hot_rows": 0}, {}, "hot_rows: .*greater than or equal to 1"),
        ({"kvsieve.window_blocks": 0}, {}, "window_blocks"),
        ({"kvsieve.save_decode": False}, {}, "save_decode=false given"),
        ({"kvsieve.prefetch": "next"}, {}, r"kvsieve\.prefetch: Input should be 'none', .* got 'next'"),
        ({}, {"hf": {"index_topk": None}}, "some/model has none. Use mode 'cache'"),
        ({}, {"cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype='nvfp4_ds_mla' is not supported"),
    ],
)
def test_what_it_refuses(extra: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(extra, **changes)


def test_it_is_wanted_by_its_name_and_mode_only() -> None:
    assert sparse_wanted(engine())
    assert not sparse_wanted(engine({"kvsieve.mode": "cache"}))
    assert not sparse_wanted(engine(connector="NixlConnector"))
    assert not sparse_wanted(SimpleNamespace(kv_transfer_config=None))


def test_as_one_of_several_connectors_it_is_refused_by_name() -> None:
    child = {
        "kv_connector": "KVSieveConnector",
        "kv_connector_extra_config": {"kvsieve.mode": "sparse"},
    }
    config = engine(connector="MultiConnector", outer={"connectors": [{"kv_connector": "Other"}, child]})
    assert sparse_wanted(config)
    with pytest.raises(ValueError, match="can't be combined with MultiConnector"):
        SparsePlan.of_config(config)


def test_tables_hold_what_the_pool_can() -> None:
    given = plan()
    assert given.table_slots(num_blocks=41_000, groups=6, max_num_seqs=64) == 72
    assert given.table_slots(num_blocks=41_000, groups=6, max_num_seqs=1024) == 41_000 // 288
    assert given.table_slots(num_blocks=100, groups=6, max_num_seqs=8) == 1
    assert given.pages(41_000) == 41_001


def test_the_mode_is_one_that_exists() -> None:
    with pytest.raises(ValueError, match=r"kvsieve\.mode: Input should be 'cache' or 'sparse'"):
        parse_settings({"kvsieve.mode": "fast"})
    with pytest.raises(ValueError, match=r"unknown key mode; did you mean kvsieve\.mode\?"):
        parse_settings({"mode": "sparse"})
