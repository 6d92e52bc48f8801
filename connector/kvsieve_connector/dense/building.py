"""A dense model's engine that is being built in this process, as attention backends see it."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.sparse.building import sparse_config
from kvsieve_connector.sparse.plan import is_dense
from kvsieve_connector.sparse.spec import HostBackedSpec, as_host_backed


def dense_config() -> VllmConfig | None:
    """Its configuration when it is in sparse mode, else None."""
    config = sparse_config()
    return config if config is not None and is_dense(config) else None


def host_backed_in_sparse_mode(spec: AttentionSpec) -> AttentionSpec:
    """The spec for the same cache: host-backed, where the engine is in sparse mode and the layer attends to
    all, causally; check.py refuses other layers."""
    config = dense_config()
    if config is None or type(spec) is not FullAttentionSpec:
        return spec
    if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        return spec
    return as_host_backed(HostBackedSpec, spec, DensePlan.of_config(config))
