"""The numbers of sparse mode: how much of a request stays on the GPU, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvsieve_connector.settings import NAME, PREFIX, ConnectorSettings, parse_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_HOT_ROWS = 32_704
"""Hot slots are numbered in int16, and come in whole blocks of 64."""

PACKED_ROW_BYTES = 656
"""Of vLLM's fp8_ds_mla: 512 e4m3, four float32 scales, 64 bfloat16."""

MAX_STEP_ROWS = 15_000
"""Rows that one request may ask for in a step: an eighth of their list must fit the static shared memory of a
multiprocessor (swap_in.cu: 24 bytes a row of 48 KiB, less the hot blocks' ids)."""

LOADING = 8
"""Requests beyond max_num_seqs that may be host-backed: vLLM does not count those that load as running."""

DENSE_ONLY = ("budget_tokens", "first_blocks", "selector", "dense_layers", "host_tokens", "exact_in_pool")
"""Settings of sparse mode that mean nothing for a DSA model."""


class HostPlan(Protocol):
    """What the scheduler's side asks of a plan. block_tokens: tokens of a block. hot_blocks: blocks of a
    request's hot buffer in each KV group. window_blocks: newest full blocks that stay in vLLM's pool.
    indexers: KV groups beside the host-backed ones, which vLLM's prefix cache answers for."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def hot_blocks(self) -> int: ...
    @property
    def window_blocks(self) -> int: ...
    @property
    def indexers(self) -> int: ...

    def table_slots(self, num_blocks: int, groups: int, max_num_seqs: int) -> int:
        """Requests that can be host-backed at once. num_blocks: of vLLM's pool. groups: host-backed ones."""

    def pages(self, num_blocks: int) -> int:
        """Blocks that all requests together can read from the arena, and one more."""


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """block_tokens: tokens of a block. topk: rows that a layer attends to per query. query_tokens: tokens
    that a request decodes in one step, 1 and the speculative ones. hot_blocks: blocks of a request's hot
    buffer in each main group. window_blocks: newest full blocks that stay on the GPU. row_bytes: of a main
    layer's row.
    """

    block_tokens: int
    topk: int
    query_tokens: int
    hot_blocks: int
    window_blocks: int
    row_bytes: int

    indexers = 1

    @property
    def hot_rows(self) -> int:
        return self.hot_blocks * self.block_tokens

    @property
    def window_tokens(self) -> int:
        return self.window_blocks * self.block_tokens

    @staticmethod
    def of_config(vllm_config: VllmConfig) -> SparsePlan:
        """For an engine of which sparse_wanted() is true; raises as of()."""
        return SparsePlan.of(vllm_config, parse_settings(extra_config(vllm_config)))

    @staticmethod
    def of(vllm_config: VllmConfig, settings: ConnectorSettings) -> SparsePlan:
        """Raises ValueError, which names the field and its limit, for what sparse mode can't serve."""
        check_settings(vllm_config, settings, DENSE_ONLY, "models with DeepSeek sparse attention")
        config = vllm_config.model_config.hf_text_config
        topk = int(getattr(config, "index_topk", 0) or 0)
        if not topk or not hasattr(config, "kv_lora_rank"):
            raise ValueError(
                f"kvsieve: {PREFIX}mode='sparse' of MLA models is for models with DeepSeek sparse attention "
                f"(index_topk and kv_lora_rank in their configuration); {vllm_config.model_config.model} has "
                "none. Use mode 'cache'"
            )
        block = int(vllm_config.cache_config.block_size)
        query_tokens = 1 + vllm_config.num_speculative_tokens
        least = topk * query_tokens
        if least > MAX_STEP_ROWS:
            raise ValueError(
                f"kvsieve: num_speculative_tokens={query_tokens - 1} with index_topk {topk} makes {least} "
                f"rows of a request in one step, sparse mode allows {MAX_STEP_ROWS}"
            )
        if query_tokens > 1 and settings.prefetch in ("previous-step+margin", "previous-layer"):
            raise ValueError(
                f"kvsieve: {PREFIX}prefetch={settings.prefetch!r} does not work with speculative decoding: "
                "it fetches for the drafter's layers from the model's graph, which ends before them"
            )
        speculative = getattr(vllm_config, "speculative_config", None)
        if getattr(speculative, "enable_adaptive_verification", False):
            raise ValueError(
                "kvsieve: sparse mode does not support enable_adaptive_verification: it needs as many tokens "
                "of each request in a step"
            )
        rows = settings.hot_rows if settings.hot_rows is not None else least + least // 2
        hot_blocks = -(-rows // block)
        if not least <= hot_blocks * block <= MAX_HOT_ROWS:
            raise ValueError(
                f"{PREFIX}hot_rows: {rows} given ({hot_blocks * block} in whole blocks of {block}), {least} "
                f"to {MAX_HOT_ROWS} allowed: at least index_topk {topk} times the tokens of a step, "
                f"{query_tokens}; without the setting it is {least + least // 2}"
            )
        return SparsePlan(
            block_tokens=block,
            topk=topk,
            query_tokens=query_tokens,
            hot_blocks=hot_blocks,
            window_blocks=settings.window_blocks,
            row_bytes=_row_bytes(vllm_config, config),
        )

    def table_slots(self, num_blocks: int, groups: int, max_num_seqs: int) -> int:
        """Requests that can be host-backed at once. num_blocks: of vLLM's pool. groups: main groups.

        Each holds a hot buffer of the pool, so that there are never many more than can run.
        """
        return max(1, min(max_num_seqs + LOADING, num_blocks // (groups * self.hot_blocks)))

    def pages(self, num_blocks: int) -> int:
        """Entries of the workers' page table, of which 0 stands for "on the GPU": one per block of the pool.

        Each block read from the arena has an indexer block on the GPU. Requests that share a prefix share the
        indexer's blocks, not the pages; so the scheduler counts pages.
        """
        return num_blocks + 1


def sparse_wanted(vllm_config: VllmConfig) -> bool:
    """Whether the engine is configured for sparse mode, by itself or in a MultiConnector's child (which
    SparsePlan.of refuses, with the reason)."""
    return str(extra_config(vllm_config).get(f"{PREFIX}mode", "")) == "sparse"


def is_dense(vllm_config: VllmConfig) -> bool:
    """Whether sparse mode treats the model as one that keeps K and V: it has no MLA latent."""
    return not hasattr(vllm_config.model_config.hf_text_config, "kv_lora_rank")


def check_settings(
    vllm_config: VllmConfig, settings: ConnectorSettings, foreign: tuple[str, ...], models: str
) -> None:
    """Raises ValueError for settings that sparse mode can't work with. foreign: those that mean nothing for
    these `models`."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != NAME:
        raise ValueError(
            f"kvsieve: sparse mode can't be combined with {transfer.kv_connector}; make {NAME} the only "
            "connector"
        )
    if not settings.save_decode:
        raise ValueError(
            f"kvsieve: {PREFIX}save_decode=false given, sparse mode requires true: a block leaves the pool "
            "only once it is saved"
        )
    for name in foreign:
        if name in settings.model_fields_set:
            raise ValueError(f"kvsieve: {PREFIX}{name} given, which means nothing for {models}; leave it out")


def extra_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """This connector's settings as given; empty when it is not used."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return {}
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == NAME:
        return dict(extra)
    for child in extra.get("connectors", ()) if transfer.kv_connector == "MultiConnector" else ():
        if child.get("kv_connector") == NAME:
            return dict(child.get("kv_connector_extra_config") or {})
    return {}


def _row_bytes(vllm_config: VllmConfig, config: Any) -> int:
    """Bytes of a main layer's row, as far as the configuration tells; to_host_backed() holds it against what
    the attention backend has chosen."""
    given = str(vllm_config.cache_config.cache_dtype)
    if given in ("fp8", "fp8_ds_mla"):
        return PACKED_ROW_BYTES
    dtype = vllm_config.model_config.dtype if given == "auto" else getattr(torch, given, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize < 2:
        raise ValueError(
            f"kvsieve: kv_cache_dtype={given!r} is not supported in sparse mode, only auto, bfloat16 and fp8"
        )
    return (int(config.kv_lora_rank) + int(config.qk_rope_head_dim)) * dtype.itemsize
