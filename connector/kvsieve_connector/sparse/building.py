"""The engine that is being built in this process, as attention backends see it."""

from __future__ import annotations

from vllm.config import VllmConfig, get_current_vllm_config_or_none

from kvsieve_connector.sparse.plan import sparse_wanted

_config: VllmConfig | None = None
"""Of the engine whose model was built last: vLLM asks for specs outside its configuration, and has settled
the block size only by then."""


def sparse_config() -> VllmConfig | None:
    """Its configuration when it is in sparse mode, else None."""
    global _config
    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None:
        _config = config
    return _config if _config is not None and sparse_wanted(_config) else None
