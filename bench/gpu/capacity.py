"""How many long requests a GPU cache holds at DeepSeek-V3.2's shapes: vLLM's planner and manager, no device.

Requests of so many tokens are prefilled in chunks, one after another, and none ends, until one does not fit.
In sparse mode, what a chunk has filled counts as saved when the next one begins. Hot buffers are counted:
they are blocks of the same pool.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.engines import make_model
from bench.gpu.table import tell
from kvsieve_store.bench.report import Goal, Report

LAYERS = 61
CHUNKS = (512, 2048)
"""max_num_batched_tokens: what is in flight counts against each request, in vLLM's number most of all."""
_AT_LEAST = 30


def measure(
    *, tokens: int = 65_536, cache_gib: float = 20.0, hot_rows: Sequence[int | None] = (None, 2048)
) -> Report:
    """hot_rows: None: the default."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), LAYERS, weights=False)
        rows = []
        for chunk in CHUNKS:
            rows.append(_row("stock", path, None, tokens, cache_gib, chunk))
            for count in hot_rows:
                own = {"mode": "sparse"} | ({"hot_rows": count} if count else {})
                rows.append(_row("kvsieve", path, own, tokens, cache_gib, chunk))
    import vllm

    parameters = {
        "layers": LAYERS,
        "tokens": tokens,
        "cache_gib": cache_gib,
        "vllm": vllm.__version__,
    }
    goal = Goal(f"requests of {tokens:,} tokens in {cache_gib:g} GiB", rows[1]["requests"], _AT_LEAST, "")
    return Report("gpu-capacity", parameters, rows, [goal])


def _row(
    engine: str, path: Path, own: dict[str, Any] | None, tokens: int, cache_gib: float, chunk: int
) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_planning import (
        _pool_bytes_per_block,
        get_global_kv_cache_groups,
        get_kv_cache_configs,
    )
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity

    config = _engine_config(path, own, tokens, chunk)
    specs = [_specs(config, sparse=own is not None)]
    groups = get_global_kv_cache_groups(config, specs)
    planned = get_kv_cache_configs(config, specs, [int(cache_gib * 2**30)], groups)
    cache = generate_scheduler_kv_cache_config(planned)
    row: dict[str, Any] = {
        "engine": engine,
        "chunk": chunk,
        "hot_rows": None,
        "requests": 0,
        "vllm_concurrency": round(get_kv_cache_capacity(config, cache)[1], 2),
        "groups": len(cache.kv_cache_groups),
        "blocks": cache.num_blocks,
        "block_bytes": _pool_bytes_per_block(config, groups),
    }
    manager = _manager(config, cache)
    if own is None:
        row["requests"] = _fill(config, manager, tokens, None)
    else:
        from kvsieve_connector.sparse.manager import bind_managers
        from kvsieve_connector.sparse.plan import SparsePlan

        plan = SparsePlan.of_config(config)
        seqs = config.scheduler_config.max_num_seqs
        residency = bind_managers(manager, plan, seqs, lambda holding: None)
        row["hot_rows"] = plan.hot_rows
        row["requests"] = _fill(config, manager, tokens, residency)
    return row


def _engine_config(path: Path, own: dict[str, Any] | None, tokens: int, chunk: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from bench.gpu.engines import kvsieve
    from kvsieve_connector.plugin import register

    register()
    config = EngineArgs(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=tokens,
        max_num_seqs=256,
        max_num_batched_tokens=chunk,
        kv_cache_dtype="fp8",
        block_size=64,
        kv_transfer_config=kvsieve("unix:///nowhere", **own) if own is not None else None,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "BLHNC"
    return config


def _specs(config: Any, *, sparse: bool) -> dict[str, Any]:
    """What the layers of the model tell vLLM on a Hopper device: main and indexer, by layer name."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    main = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
        is_index_group_leader=True,
    )
    indexer = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    if sparse:
        from kvsieve_connector.sparse.plan import SparsePlan
        from kvsieve_connector.sparse.spec import to_host_backed

        main = to_host_backed(main, SparsePlan.of_config(config))
    specs: dict[str, Any] = {}
    for layer in range(LAYERS):
        specs[f"model.layers.{layer}.self_attn"] = main
        specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = indexer
    return specs


def _manager(config: Any, cache: Any) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager(
        kv_cache_config=cache,
        max_model_len=config.model_config.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
        enable_caching=True,
        scheduler_block_size=64,
        hash_block_size=64,
    )


def _fill(config: Any, manager: Any, tokens: int, residency: Any) -> int:
    """Requests that have been prefilled whole when the first does not fit."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(64, sha256)
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, eos_token_id=1)
    held = 0
    while held < config.scheduler_config.max_num_seqs:
        # A first token of its own makes every block of it one that no other request has.
        request = Request(
            request_id=str(held),
            prompt_token_ids=[held + 2] * (tokens - 1),
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        while request.num_computed_tokens < request.num_prompt_tokens:
            count = min(
                config.scheduler_config.max_num_batched_tokens,
                request.num_prompt_tokens - request.num_computed_tokens,
            )
            first = not request.num_computed_tokens
            if manager.allocate_slots(request, count, full_sequence_must_fit=first) is None:
                return held
            request.num_computed_tokens += count
            if residency is not None:
                residency.set_durable(request.request_id, request.num_computed_tokens // 64)
                manager.coordinator.remove_skipped_blocks(
                    request.request_id, request.num_computed_tokens, request.num_prompt_tokens
                )
        held += 1
    return held


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu capacity", description=__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a request")
    parser.add_argument("--gib", type=float, default=20.0, help="GPU memory for the cache")
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None:
        raise SystemExit("bench.gpu capacity needs vLLM 0.33, with or without a device")
    tell(measure(tokens=args.tokens, cache_gib=args.gib))


if __name__ == "__main__":
    main()
