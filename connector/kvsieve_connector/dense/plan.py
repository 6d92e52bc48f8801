"""The numbers of sparse mode on a dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsieve_connector.settings import PREFIX, ConnectorSettings, parse_settings
from kvsieve_connector.sparse.plan import LOADING, check_settings, extra_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DSA_ONLY = ("hot_rows", "prefetch", "sharded_fetch")
"""Settings of sparse mode that mean nothing for a dense model."""

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "half")


@dataclass(frozen=True, slots=True)
class DensePlan:
    """block_tokens: tokens of a block. budget_blocks: blocks that a decode step attends to beside the
    first_blocks and the window_blocks, the newest full ones, which also stay in vLLM's pool. selector: which.
    dense_layers: first layers that attend to all. max_blocks: of a request, the last one in part.
    """

    block_tokens: int
    budget_blocks: int
    first_blocks: int
    window_blocks: int
    selector: str
    dense_layers: int
    max_blocks: int
    max_num_seqs: int

    hot_blocks = 0  # what is in the arena is read there
    indexers = 0

    @property
    def attention(self) -> str:
        """What decides how far attention, and so the keys and values of what is decoded, is from exact."""
        picked = f"{self.budget_blocks}+{self.first_blocks}+{self.window_blocks}"
        return f"{self.selector} {picked} of {self.block_tokens} dense {self.dense_layers}"

    @property
    def attended_blocks(self) -> int:
        """Full blocks that a decode step attends to at most."""
        return self.first_blocks + self.budget_blocks + self.window_blocks

    @staticmethod
    def of_config(vllm_config: VllmConfig) -> DensePlan:
        """For an engine of which sparse_wanted() and is_dense() are true; raises as of()."""
        return DensePlan.of(vllm_config, parse_settings(extra_config(vllm_config)))

    @staticmethod
    def of(vllm_config: VllmConfig, settings: ConnectorSettings) -> DensePlan:
        """Raises ValueError, which names the field and its limit, for what sparse mode can't serve."""
        check_settings(vllm_config, settings, DSA_ONLY, "models without DeepSeek sparse attention")
        if vllm_config.speculative_config is not None:
            raise ValueError("kvsieve: sparse mode of dense models does not support speculative decoding")
        cache = vllm_config.cache_config
        if str(cache.cache_dtype) not in CACHE_DTYPES:
            raise ValueError(
                f"kvsieve: kv_cache_dtype={cache.cache_dtype!r} is not supported in sparse mode of dense "
                "models, only what the model computes in: use auto"
            )
        layers = int(getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", 0))
        if settings.dense_layers > layers:
            raise ValueError(
                f"{PREFIX}dense_layers: {settings.dense_layers} given, the model has {layers} layers"
            )
        block = int(cache.block_size)
        return DensePlan(
            block_tokens=block,
            budget_blocks=-(-settings.budget_tokens // block),
            first_blocks=settings.first_blocks,
            window_blocks=settings.window_blocks,
            selector=settings.selector,
            dense_layers=settings.dense_layers,
            max_blocks=-(-int(vllm_config.model_config.max_model_len) // block),
            max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
        )

    def table_slots(self, num_blocks: int, groups: int, max_num_seqs: int) -> int:
        """As HostPlan: what a request costs beside its blocks is the workers' memory for summaries."""
        return max_num_seqs + LOADING

    def pages(self, num_blocks: int) -> int:
        """As HostPlan: only the arena bounds what is read from it, and the scheduler counts its slots."""
        return self.table_slots(num_blocks, 1, self.max_num_seqs) * self.max_blocks + 1
