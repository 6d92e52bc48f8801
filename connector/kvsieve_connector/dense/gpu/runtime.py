"""What attention needs of the sparse tier, on a GPU: per layer the blocks that each row attends to.

The connector's worker half makes one runtime when the caches are registered, and gives each attention
implementation its layer. Nothing here allocates or waits on the decode path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from kvsieve_connector.dense.gpu.kernel_set import BlockKernels
from kvsieve_connector.dense.gpu.tables import DenseTables
from kvsieve_connector.device import upload
from kvsieve_connector.kernels.block_tables import LayerBlocks, Picks
from kvsieve_connector.kernels.summarise import KeySources
from kvsieve_connector.sparse.runtime import BatchRow
from kvsieve_connector.sparse.staging import StagedContexts, Staging

COPY_BLOCKS = 64
"""Thread blocks that copy pages within the GPU."""


@dataclass(frozen=True, slots=True)
class Lists:
    """What a decode batch attends to in a layer, a row for each request and KV head.

    query: [R * H, group, D]. table: int32 [R * H, blocks], pieces of the layer's cache. lengths: int32
    [R * H]. starts: int32 [R * H + 1], as each row has one token. longest: tokens of a list at most.
    """

    query: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Requests of a batch that attend to their whole contexts in one call.

    rows, tokens: their parts of the batch. starts: int32 [n + 1], their tokens' in the part. lengths: int32
    [n]. longest_query, longest: tokens of the step, and of the context, at most. staged: where the pages of a
    request's context are that is not all in the pool; then there is one request.
    """

    rows: slice
    tokens: slice
    starts: torch.Tensor
    lengths: torch.Tensor
    longest_query: int
    longest: int
    staged: StagedPart | None


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A context of which some pages are in the arena.

    contexts: these, with their places in the staging buffer. table: int32 [1, B], all pages' places. pooled:
    int64, blocks of the request that are in the pool; first: their first place, after the arena's.
    """

    contexts: StagedContexts
    table: torch.Tensor
    pooled: torch.Tensor
    first: int


class DenseLayer:
    """One layer: its cache, and what is kept of it in the arena."""

    def __init__(self, order: int, blocks: LayerBlocks, runtime: DenseGpuRuntime) -> None:
        """order: of the layer's run, from 0."""
        self.order, self.blocks, self.runtime = order, blocks, runtime
        cache = blocks.cache
        _, heads, tokens, columns = cache.shape
        # Every piece as a page of one head.
        pieces = (cache.shape[0] - 1) * blocks.stride_pieces + heads
        size = tokens * columns
        self.pages = cache.as_strided((pieces, tokens, 1, columns), (size, columns, columns, 1))
        """[pieces, N, 1, 2 * D]: what Lists.table names."""

    def pick(self, query: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor) -> Lists:
        """query: [R, H * group, D]. lengths: int32 [R]. block_table: int32 [R, B]. The lists are overwritten
        by the next layer's."""
        rt = self.runtime
        lists = rt.lists(query.shape[0], query)
        rt.kernels.pick_blocks(
            self.blocks,
            rt.tables.blocks,
            rt.picks,
            query,
            lengths,
            block_table,
            lists.table,
            lists.lengths,
            lists.query,
            write_whole=self.order == 0,
        )
        return lists

    def stage(self, part: PrefillPart, block_table: torch.Tensor) -> torch.Tensor:
        """The whole context of a part's request: [pages, H, N, 2 * D], of which part.staged.table tells.

        block_table: int32 [R, B] of the batch.
        """
        rt, staged = self.runtime, part.staged
        assert staged is not None
        buffer, cache = rt.staging.take(self.order, staged.contexts), self.blocks.cache
        if staged.pooled.numel():
            ids = block_table[part.rows.start].index_select(0, staged.pooled)
            stride = cache.stride(0) * cache.element_size()
            addresses = ids.to(torch.int64) * stride + cache.data_ptr()
            rt.kernels.fetch_pages(buffer[staged.first :], addresses, COPY_BLOCKS)
        rt.fetch_ahead(self.order, part)
        return buffer.view(cache.dtype).view(-1, *cache.shape[1:])


class DenseGpuRuntime:
    """All layers of a worker, their tables, and the batch of the current step."""

    def __init__(
        self,
        picks: Picks,
        tables: DenseTables,
        layers: dict[str, LayerBlocks],
        kernels: BlockKernels,
        sources: KeySources,
        summaries: torch.Tensor,
        max_blocks: int,
    ) -> None:
        """layers: by name, in the order in which the model runs them. summaries: [L, H, P, width].
        max_blocks: of a request."""
        self.picks, self.tables, self.kernels = picks, tables, kernels
        self.layers = {
            name: DenseLayer(order, blocks, self) for order, (name, blocks) in enumerate(layers.items())
        }
        self._sources, self._summaries = sources, summaries
        self._max_blocks = max_blocks
        like = next(iter(layers.values())).cache
        self._device = like.device
        self._heads, self._tokens = like.shape[1], like.shape[2]
        rows = tables.sizes.rows * self._heads
        wide = max(max_blocks, picks.listed + 1)
        self._table = torch.zeros((rows, wide), dtype=torch.int32, device=self._device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=self._device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        self._query: torch.Tensor | None = None
        self.schedule: torch.Tensor | None = None
        """How the attention kernel divides a decode batch, which the first layer finds out; the backend's."""
        self._batch: Sequence[BatchRow] = ()
        self._parts: list[PrefillPart] | None = None
        self.decodes = 0
        """Rows of the batch that decode, the first ones: one token each."""
        self.differs = False
        """Whether some request of the batch picks, or has blocks that only the arena holds."""
        pages = [_Page(blocks) for blocks in layers.values()]
        self.staging = Staging(pages, tables, kernels, capacity=max_blocks)

    def begin(self, batch: Sequence[BatchRow]) -> int:
        """The next forward computes this batch, in row order. Tables are brought up to date for it, and
        summaries made. Returns of how many blocks."""
        self._batch, self._parts = batch, None
        self.decodes = len(list(takewhile(lambda row: row.scheduled == 1, batch)))
        self.differs = any(self.tables.picks(row.req_id) for row in batch)
        self.tables.set_rows([row.req_id for row in batch])
        due = self.tables.flush()
        if due.pages:
            self.kernels.summarise(
                self._sources,
                self.picks.selector,
                upload(due.sources, torch.int64, self._device),
                upload(due.pages, torch.int32, self._device),
                self._summaries,
            )
        self.staging.reset()
        return len(due.pages)

    def idle(self) -> None:
        """Graphs that are replayed, and forwards that run, from now on until begin() have no batch."""
        self._batch, self._parts, self.decodes, self.differs = (), None, 0, False
        self.tables.clear_rows()

    def lists(self, rows: int, query: torch.Tensor) -> Lists:
        """Room for the lists of a decode batch. query: [rows, H * group, D]."""
        group, dim = query.shape[1] // self._heads, query.shape[2]
        if self._query is None:
            self._query = query.new_empty((self._lengths.shape[0], group, dim))
        n = rows * self._heads
        return Lists(
            self._query[:n],
            self._table[:n],
            self._lengths[:n],
            self._starts[: n + 1],
            self._table.shape[1] * self._tokens,
        )

    def prefill_parts(self) -> list[PrefillPart]:
        """The batch's requests that do not decode."""
        if self._parts is None:
            self._parts = self._split()
        return self._parts

    def fetch_ahead(self, layer: int, part: PrefillPart) -> None:
        """Starts to fetch what prefill attention needs after this layer and part."""
        assert self._parts is not None
        staged = [each.staged for each in self._parts if each.staged is not None]
        number = next(i for i, each in enumerate(staged) if each is part.staged) + 1
        if number == len(staged):
            layer, number = layer + 1, 0
        self.staging.ahead(layer, staged[number].contexts)

    def _split(self) -> list[PrefillPart]:
        parts: list[PrefillPart] = []
        start = self.decodes
        for index in range(start, len(self._batch)):
            if self.tables.reads_arena(self._batch[index].req_id):
                if start < index:
                    parts.append(self._part(start, index, None))
                parts.append(self._part(index, index + 1, self._staged(self._batch[index])))
                start = index + 1
        if start < len(self._batch):
            parts.append(self._part(start, len(self._batch), None))
        return parts

    def _part(self, first: int, last: int, staged: StagedPart | None) -> PrefillPart:
        members = self._batch[first:last]
        begin = sum(row.scheduled for row in self._batch[:first])
        starts = [0]
        for row in members:
            starts.append(starts[-1] + row.scheduled)
        lengths = [row.computed + row.scheduled for row in members]
        return PrefillPart(
            slice(first, last),
            slice(begin, begin + starts[-1]),
            upload(starts, torch.int32, self._device),
            upload(lengths, torch.int32, self._device),
            max(row.scheduled for row in members),
            max(lengths),
            staged,
        )

    def _staged(self, row: BatchRow) -> StagedPart:
        contexts = self.staging.contexts([row.req_id])
        assert contexts is not None
        indices, _ = self.tables.host_pages(row.req_id)
        blocks = -(-(row.computed + row.scheduled) // self._tokens)
        in_arena = set(indices.tolist())
        pooled = [index for index in range(blocks) if index not in in_arena]
        table = contexts.places[:, :blocks].clone()
        at = upload(pooled, torch.int64, self._device)
        table[0, at] = torch.arange(
            len(in_arena), len(in_arena) + len(pooled), dtype=torch.int32, device=self._device
        )
        return StagedPart(contexts, table, at, len(in_arena))


class _Page:
    """A layer as Staging sees it: pages of a block each."""

    def __init__(self, blocks: LayerBlocks) -> None:
        self.layer_offset = blocks.layer_offset
        cache = blocks.cache
        size = cache.shape[1] * blocks.piece_bytes
        self.cache = torch.empty((0, 1, size), dtype=torch.uint8, device=cache.device)
