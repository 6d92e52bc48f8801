"""What attention needs of the sparse tier: per layer the way from top-k positions to rows of its cache.

The connector's worker half makes one runtime when the caches are registered, and gives each attention
implementation its layer. Nothing here allocates or waits on the decode path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvsieve_connector.device import upload
from kvsieve_connector.kernels.swap_in import LayerCache
from kvsieve_connector.sparse.ahead import Prefetcher
from kvsieve_connector.sparse.prefetch import Policy
from kvsieve_connector.sparse.staging import StagedContexts, Staging
from kvsieve_connector.sparse.tables import HostTables
from kvsieve_connector.sparse.warm import WarmStarts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvsieve_connector.sparse.kernel_set import KernelSet
    from kvsieve_connector.sparse.plan import SparsePlan

LATENT_WIDTH = 576
"""Columns of an unpacked row: 512 of the latent, 64 of the rotary key."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A request of the step's batch. computed, scheduled: tokens before this step, and of it."""

    req_id: str
    computed: int
    scheduled: int


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Prefill requests whose contexts fit the workspace together.

    number: of the group in the batch. first, last: their batch rows. tokens: their part of the step's tokens.
    slots, starts, lengths: int32 [n], table slot, first row in the workspace and tokens of each context.
    token_starts: int32 [tokens, 1], the first row of each token's request. rows: of the workspace, in use.
    contexts: their pages in the arena; None when all are on the GPU.
    """

    number: int
    first: int
    last: int
    tokens: slice
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    token_starts: torch.Tensor
    rows: int
    contexts: StagedContexts | None


class HostLayer:
    """One main layer: its cache, and what is kept of it in the arena."""

    def __init__(self, order: int, cache: LayerCache, runtime: SparseRuntime) -> None:
        """order: of the layer's run among the main layers, from 0."""
        self.order, self.cache, self.runtime = order, cache, runtime

    def swap_in(
        self, topk: torch.Tensor, block_table: torch.Tensor, stride_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the layer's cache for a decode batch, fetched where they are missing.

        topk: int32 [T, k] positions, -1 for none, T / R rows per request. block_table: int32 [R, B].
        stride_rows: rows between two blocks of the cache. Returns int32 [T, k] rows, -1 for none, and
        int32 [T] how many there are; both are used again by the next layer.
        """
        rt = self.runtime
        rows = topk.shape[0]
        requests = block_table.shape[0]
        out, counts = rt.outputs(rows)
        rt.prefetcher.before()
        rt.kernels.swap_in(
            self.cache,
            rt.tables.requests,
            topk,
            block_table,
            out,
            counts,
            query_tokens=rows // requests,
            stride_rows=stride_rows,
        )
        rt.prefetcher.after(self.order, topk, requests)
        return out, counts

    def gather(self, group: PrefillGroup, block_table: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        """The contexts of a prefill group: bf16 [group.rows, 576], the first rows of `workspace`.

        block_table: int32 [R, B] of the whole batch.
        """
        rt = self.runtime
        contexts = group.contexts
        staging = rt.staging.take(self.order, contexts) if contexts is not None else None
        rows = workspace[: group.rows]
        rt.kernels.gather_context(
            rows,
            self.cache,
            rt.tables.requests,
            block_table[group.first : group.last],
            group.slots,
            group.starts,
            group.lengths,
            contexts.places if contexts is not None else None,
            staging,
        )
        rt.fetch_ahead(self.order, group)
        return rows


class SparseRuntime:
    """All main layers of a worker, their tables, and the batch of the current step."""

    def __init__(
        self,
        plan: SparsePlan,
        tables: HostTables,
        caches: dict[str, LayerCache],
        kernels: KernelSet,
        policy: Policy,
        workspace_rows: int,
        model_layers: int | None = None,
    ) -> None:
        """caches: layer name -> its cache, in the order in which the model runs them. workspace_rows: of the
        workspace for gathered contexts, which holds the longest. model_layers: how many of the layers are
        the model's own, before a drafter's; None: all."""
        self.plan, self.tables, self.kernels = plan, tables, kernels
        self.workspace_rows = workspace_rows
        self._model_layers = model_layers if model_layers is not None else len(caches)
        self.layers = {
            name: HostLayer(order, cache, self) for order, (name, cache) in enumerate(caches.items())
        }
        device = next(iter(caches.values())).cache.device
        self._device = device
        rows = tables.sizes.rows * plan.query_tokens
        self._out = torch.full((rows, plan.topk), -1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.prefetcher = Prefetcher(policy, list(caches.values()), tables, kernels, plan.topk)
        self.warm = WarmStarts(list(caches.values()), tables, kernels) if policy.warm_start else None
        self._batch: Sequence[BatchRow] = ()
        self.reads_host = False
        """Whether some request of the batch has blocks that only the arena holds."""
        self._groups: tuple[int, list[PrefillGroup]] | None = None
        self.staging = Staging(
            list(caches.values()), tables, kernels, capacity=-(-workspace_rows // plan.block_tokens)
        )

    def outputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for a decode batch's indices, int32 [rows, k], and counts, int32 [rows]."""
        if rows > self._out.shape[0]:  # only while graphs are captured for more rows than there are requests
            return self._out.new_empty((rows, self.plan.topk)), self._counts.new_empty(rows)
        return self._out[:rows], self._counts[:rows]

    def begin(self, batch: Sequence[BatchRow]) -> None:
        """The next forward computes this batch, in row order; tables are brought up to date for it."""
        self._batch, self._groups = batch, None
        self.reads_host = any(self.tables.has_pages(row.req_id) for row in batch)
        self.tables.set_rows([row.req_id for row in batch])
        self.tables.flush()
        if self.warm is not None:
            self.warm.fetch()
        self.staging.reset()

    def prefill_groups(self, first: int) -> list[PrefillGroup]:
        """The batch's requests from row `first` on, in groups that fit the workspace."""
        if self._groups is None or self._groups[0] != first:
            self._groups = (first, self._split(first))
        return self._groups[1]

    def fetch_ahead(self, layer: int, group: PrefillGroup) -> None:
        """Starts to fetch what prefill attention needs after this layer and group."""
        assert self._groups is not None
        groups = self._groups[1]
        if group.number + 1 < len(groups):
            following = groups[group.number + 1]
        else:
            layer, following = layer + 1, groups[0]
            if layer == self._model_layers:  # a drafter's batch may be split otherwise
                return
        self.staging.ahead(layer, following.contexts)

    def _split(self, first: int) -> list[PrefillGroup]:
        groups: list[PrefillGroup] = []
        start, rows = first, 0
        for index in range(first, len(self._batch)):
            length = self._batch[index].computed + self._batch[index].scheduled
            if rows and rows + length > self.workspace_rows:
                groups.append(self._group(len(groups), start, index))
                start, rows = index, 0
            rows += length
        if start < len(self._batch):
            groups.append(self._group(len(groups), start, len(self._batch)))
        return groups

    def _group(self, number: int, first: int, last: int) -> PrefillGroup:
        members = self._batch[first:last]
        begin = sum(row.scheduled for row in self._batch[:first])
        lengths = [row.computed + row.scheduled for row in members]
        starts = [sum(lengths[:i]) for i in range(len(members))]
        slots = [self.tables.slot(row.req_id) for row in members]
        scheduled = [row.scheduled for row in members]
        table = upload([slots, starts, lengths, scheduled], torch.int32, self._device)
        tokens = sum(scheduled)
        token_starts = torch.repeat_interleave(table[1], table[3], output_size=tokens)
        return PrefillGroup(
            number,
            first,
            last,
            slice(begin, begin + tokens),
            table[0],
            table[1],
            table[2],
            token_starts.unsqueeze(1),
            sum(lengths),
            self.staging.contexts([row.req_id for row in members]),
        )


def workspace_rows(vllm_config: VllmConfig) -> int:
    """Rows of the workspace for gathered contexts: the longest context fits."""
    return -(-int(vllm_config.model_config.max_model_len) // 64) * 64
