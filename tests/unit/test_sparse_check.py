"""What sparse mode refuses to start on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve_connector.sparse.check import check_config, check_layers
from tests.engine.sparse_vllm import plan_cache, sparse_plan, vllm_config
from tests.unit.test_sparse_plan import engine as plan_engine


def cache(plan: Any = None, layout: str = "BLHNC") -> Any:
    """The planner's groups for a DSA model; plan: None: without host-backed layers."""
    planned = plan_cache(vllm_config(4096, 256), 4, 64 << 20, plan)
    return SimpleNamespace(kv_cache_groups=planned.kv_cache_groups, kv_cache_layout=layout)


def engine(**changes: Any) -> Any:
    hot_rows = changes.get("hot_rows")
    config = plan_engine({"kvsieve.hot_rows": hot_rows} if hot_rows else None, hf=changes.get("hf", {}))
    config.use_v2_model_runner = changes.get("v2", True)
    config.parallel_config = SimpleNamespace(use_ubatching=changes.get("ubatching", False))
    return config


def test_a_dsa_model_as_planned_is_accepted() -> None:
    check_config(engine(), cache(sparse_plan()))


@pytest.mark.parametrize(
    ("changes", "planned", "message"),
    [
        ({"v2": False}, {}, "V2 model runner, .*VLLM_USE_V2_MODEL_RUNNER=not set"),
        ({"v2": False, "hf": {"index_topk": 0}}, {}, "is for models with DeepSeek sparse attention"),
        ({"v2": False, "hot_rows": 10}, {}, "hot_rows: 10 given"),
        ({"ubatching": True}, {}, "--enable-dbo"),
        ({}, {"layout": "LBNHC"}, "layout BLHNC, this engine has LBNHC"),
        ({}, {"plan": None}, "no layer is host-backed: .* FLASHMLA_SPARSE"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], planned: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(engine(**changes), cache(**{"plan": sparse_plan()} | planned))


def test_more_groups_than_the_indexers_are_refused() -> None:
    found = cache(sparse_plan())
    found.kv_cache_groups.append(found.kv_cache_groups[-1])
    with pytest.raises(ValueError, match="this model has 2"):
        check_config(engine(), found)


def test_a_main_layer_on_a_backend_that_is_not_known_is_named() -> None:
    found = cache(sparse_plan())
    stranger = SimpleNamespace(block_size=64)
    found.kv_cache_groups[-1] = SimpleNamespace(layer_names=["layers.9.attn"], kv_cache_spec=stranger)
    with pytest.raises(ValueError, match=r"layers layers\.9\.attn are not host-backed"):
        check_config(engine(), found)


def test_layers_that_run_other_attention_are_refused() -> None:
    layers = {"layers.0.attn": SimpleNamespace(impl=object())}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(ValueError, match=r"layers\.0\.attn runs object, .*VLLM_PLUGINS"):
        check_layers(config, ["layers.0.attn"])
