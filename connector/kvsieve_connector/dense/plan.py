"""The numbers of sparse mode on a dense model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvsieve_connector.dense.selectors import DEFAULT
from kvsieve_connector.kernels.block_tables import vectors_of
from kvsieve_connector.settings import PREFIX, ConnectorSettings, parse_settings
from kvsieve_connector.sparse.plan import LOADING, check_settings, extra_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvsieve")

DSA_ONLY = ("prefetch", "sharded_fetch")
"""Settings of sparse mode that mean nothing for a dense model."""

GPU_ONLY = ("hot_rows", "host_tokens", "exact_in_pool")
"""Settings of a dense model that mean nothing on a CPU."""

HOST_TOKENS = 1 << 20
"""Tokens that summaries have room for at most, by default."""

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "half")


@dataclass(frozen=True, slots=True)
class DensePlan:
    """block_tokens: tokens of a block. budget_blocks: blocks that a decode step attends to beside the
    first_blocks and the window_blocks, the newest full ones, which also stay in vLLM's pool. selector: which.
    dense_layers: first layers that attend to all. max_blocks: of a request, the last one in part. hot_blocks:
    of a request's hot buffer; 0 on a CPU, where what is in the arena is read there. host_tokens: on a GPU,
    tokens in the arena of all requests that summaries have room for. in_flight_tokens: computed by one step
    at most. exact_in_pool: on a GPU, whether what is wholly in the pool is attended to exactly.
    """

    block_tokens: int
    budget_blocks: int
    first_blocks: int
    window_blocks: int
    selector: str
    dense_layers: int
    max_blocks: int
    max_num_seqs: int
    hot_blocks: int = 0
    host_tokens: int = 0
    in_flight_tokens: int = 0
    exact_in_pool: bool = False

    indexers = 0

    @property
    def attention(self) -> str:
        """What decides how far attention, and so the keys and values of what is decoded, is from exact. Not
        hot_blocks: they only move the length from which on a request picks."""
        picked = f"{self.budget_blocks}+{self.first_blocks}+{self.window_blocks}"
        by = f"{self.selector}/{vectors_of(self.selector, self.block_tokens)}"
        where = " exact in pool" if self.exact_in_pool else ""
        return f"{by} {picked} of {self.block_tokens} dense {self.dense_layers}{where}"

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
        device = "cpu" if vllm_config.device_config.device_type == "cpu" else "gpu"
        block = int(cache.block_size)
        max_len = int(vllm_config.model_config.max_model_len)
        max_num_seqs = int(vllm_config.scheduler_config.max_num_seqs)
        plan = DensePlan(
            block_tokens=block,
            budget_blocks=-(-settings.budget_tokens // block),
            first_blocks=settings.first_blocks,
            window_blocks=settings.window_blocks,
            selector=settings.selector or DEFAULT,
            dense_layers=settings.dense_layers,
            max_blocks=-(-max_len // block),
            max_num_seqs=max_num_seqs,
        )
        if device == "cpu":
            for name in GPU_ONLY:
                if name in settings.model_fields_set:
                    raise ValueError(
                        f"kvsieve: {PREFIX}{name} given, which means nothing on a CPU; leave it out"
                    )
            return plan
        if settings.dense_layers:
            raise ValueError(
                f"kvsieve: {PREFIX}dense_layers={settings.dense_layers} given; on a GPU sparse mode of dense "
                "models picks in all layers: leave it out"
            )
        least = plan.attended_blocks * block
        rows = settings.hot_rows if settings.hot_rows is not None else 2 * least
        if rows < least:
            raise ValueError(
                f"{PREFIX}hot_rows: {rows} given, at least {least} are needed: the budget, "
                f"{PREFIX}first_blocks and {PREFIX}window_blocks in blocks of {block} tokens; without the "
                f"setting it is {2 * least}"
            )
        tokens = settings.host_tokens
        return replace(
            plan,
            hot_blocks=-(-rows // block),
            in_flight_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
            exact_in_pool=settings.exact_in_pool,
            host_tokens=tokens if tokens is not None else min(max_num_seqs * max_len, HOST_TOKENS),
        )

    def table_slots(self, num_blocks: int, groups: int, max_num_seqs: int) -> int:
        """As HostPlan: a hot buffer each on a GPU; on a CPU what a request costs beside its blocks is the
        workers' memory for summaries."""
        if not self.hot_blocks:
            return max_num_seqs + LOADING
        return max(1, min(max_num_seqs + LOADING, num_blocks // self.hot_blocks))

    def pages(self, num_blocks: int) -> int:
        """As HostPlan: on a GPU, blocks that have summaries; on a CPU only the arena bounds what is read from
        it, and the scheduler counts its slots."""
        if self.hot_blocks:
            return self.host_tokens // self.block_tokens + 1
        return self.table_slots(num_blocks, 1, self.max_num_seqs) * self.max_blocks + 1

    @property
    def summary_pages(self) -> int:
        """On a GPU: what pages() counts are blocks that may have left the pool; a request's newest have
        summaries, too."""
        flight = 2 * -(-self.in_flight_tokens // self.block_tokens)
        most = (
            min(self.max_num_seqs, self.host_tokens // self.block_tokens // max(self.attended_blocks, 1)) + 1
        )
        return self.pages(0) + 2 * flight + most * (self.window_blocks + 2)


def tell(plan: DensePlan) -> None:
    """Says in the log that attention is approximate from now on."""
    if plan.hot_blocks and not plan.exact_in_pool:
        hot, least = plan.hot_blocks * plan.block_tokens, plan.attended_blocks * plan.block_tokens
        when = f"once a request has {hot} tokens below its newest blocks, or {least} and begins in the store"
    else:
        when = "once a request has blocks that only the arena has"
    logger.warning(
        "kvsieve: sparse mode on a dense model: %s, its decode steps attend to a part of the context only, "
        "which is an approximation: %d tokens that %r picks, the first %d and the newest %d blocks of %d "
        "tokens. Prompts%s attend to all",
        when,
        plan.budget_blocks * plan.block_tokens,
        plan.selector,
        plan.first_blocks,
        plan.window_blocks,
        plan.block_tokens,
        f", and the first {plan.dense_layers} layers," if plan.dense_layers else "",
    )
