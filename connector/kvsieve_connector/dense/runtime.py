"""A step's batch on a worker, and per layer the blocks that its requests attend to.

Requests that are wholly in vLLM's pool are vLLM's. Of the others, in each layer, the blocks are put together
in a workspace that has the form of the layer's cache, so that vLLM's own kernel runs over it: those that the
query picks, for a decode step; all of them, for a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsieve_connector.dense.contexts import HostContext, HostContexts
from kvsieve_connector.dense.pages import I64Array, Pages
from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.dense.selectors import Selector, select
from kvsieve_connector.metadata import HostRow

SUMMARISED_AT_ONCE = 256
"""Blocks: bounds the memory that it takes."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A request of the batch. tokens: its part of the step's. blocks: int64, ids in the pool of its blocks up
    to the newest, wrong for those in the arena. length: tokens of its context, this step's included. full:
    blocks that were full before it. context: None for one that is wholly in the pool. picks: it attends to
    what the query picks.
    """

    tokens: range
    blocks: I64Array
    length: int
    full: int
    context: HostContext | None = None
    picks: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that attend together: one call of the kernel.

    tokens: int64, their places in the batch. cache: of the layer's form; None: the layer's own. starts: int32
    [rows + 1], their tokens' in the part. lengths: int32 [rows]. table: int32 [rows, n], pages in `cache`.
    """

    tokens: Tensor
    cache: Tensor | None
    starts: Tensor
    lengths: Tensor
    table: Tensor


@dataclass(slots=True)
class Batch:
    """pool: rows that are wholly in the pool. host: the others. prepared: what of a step can be used in many
    layers; the backend's."""

    pool: list[BatchRow]
    host: list[BatchRow]
    prepared: dict[Any, Any] = field(default_factory=dict)


class DenseRuntime:
    """All layers of a worker. counts: what was done since they were taken, by the names of stats.py."""

    def __init__(
        self,
        plan: DensePlan,
        names: Sequence[str],
        pages: Pages,
        selector: Selector,
        order: Tensor,
        like: Tensor,
    ) -> None:
        """names: the layers, as pages has them. order: packing.key_order(). like: a layer's cache,
        [num_blocks, heads, block_tokens, 2 * dim]."""
        self.layers = {name: layer for layer, name in enumerate(names)}
        self._plan, self._pages, self._selector, self._key_order = plan, pages, selector, order
        self._dim = like.shape[3] // 2
        self.contexts = HostContexts(len(names), pages.heads, selector.width, like.dtype)
        self.counts: dict[str, float] = {}
        self._workspace = like.new_empty((plan.max_blocks, *like.shape[1:]))  # touched as far as it is used
        self._rows: dict[int, HostRow] = {}
        self._known: tuple[Any, Batch | None] | None = None

    def begin(self, rows: Sequence[HostRow]) -> None:
        """The next forward has these host-backed requests in its batch, and maybe others."""
        self._rows = {row.block: row for row in rows}
        self._known = None

    def batch(self, metadata: Any) -> Batch | None:
        """The batch of this attention metadata; None when vLLM's pool has all of it.

        vLLM's V1 runner does not tell which requests are in it. A row's newest block is its request's alone.
        """
        if not self._rows:
            return None
        if self._known is None or self._known[0] is not metadata:
            self._known = metadata, self._split(metadata)
        return self._known[1]

    def parts(self, name: str, batch: Batch, query: Tensor) -> Iterator[Part]:
        """What attends in a layer. query: [tokens, query heads, dim] of the batch. A part's cache is good
        until the next one is asked for."""
        layer = self.layers[name]
        if batch.pool:
            wide = max(len(row.blocks) for row in batch.pool)
            table = torch.zeros((len(batch.pool), wide), dtype=torch.int32)
            for i, row in enumerate(batch.pool):
                table[i, : len(row.blocks)] = torch.from_numpy(row.blocks)
            yield self._part(batch.pool, None, [row.length for row in batch.pool], table)
        group: list[BatchRow] = []
        taken = 0
        for row in batch.host:
            room = self._blocks_of(layer, row)
            if group and taken + room > len(self._workspace):
                yield self._gathered(layer, group, query)
                group, taken = [], 0
            group.append(row)
            taken += room
        if group:
            yield self._gathered(layer, group, query)

    def take_counts(self) -> dict[str, float]:
        counts, self.counts = self.counts, {}
        return counts

    def _split(self, metadata: Any) -> Batch | None:
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        newest = (metadata.slot_mapping // self._plan.block_tokens).tolist()
        batch = Batch([], [])
        for i, length in enumerate(lengths):
            tokens = range(starts[i], starts[i + 1])
            if not tokens:
                continue
            blocks = metadata.block_table[i, : -(-length // self._plan.block_tokens)].numpy().astype(np.int64)
            full = (length - len(tokens)) // self._plan.block_tokens
            told = self._rows.get(newest[tokens[-1]])
            context = self.contexts.get(told.req_id) if told is not None else None
            if told is None or context is None or not context.arena_blocks:
                batch.pool.append(BatchRow(tokens, blocks, length, full))
                continue
            picks = told.decodes and full > self._plan.attended_blocks
            row = BatchRow(tokens, blocks, length, full, context, picks)
            if picks:
                self._summarise(row, context)
            batch.host.append(row)
        if batch.host and (metadata.causal is not True or metadata.dynamic_causal is not None):
            raise RuntimeError("kvsieve: sparse mode of dense models attends causally; this model does not")
        return batch if batch.host else None

    def _summarise(self, row: BatchRow, context: HostContext) -> None:
        """Makes the summaries that the row's full blocks lack, in all layers: of one block now and then, of
        the whole context when it first reads the arena."""
        slots = context.slots(row.full)
        while (first := context.summarised) < row.full:
            end = min(first + SUMMARISED_AT_ONCE, row.full)
            for layer in range(len(self.layers)):
                keys = self._pages.keys(
                    layer, row.blocks[first:end], slots[first:end], self._key_order, self._workspace
                )
                context.summarise(layer, first, self._selector.summarise(keys))
            context.summarised = end
            self._count(summarised_blocks=end - first)

    def _blocks_of(self, layer: int, row: BatchRow) -> int:
        """Pages of the workspace that the row takes in a layer."""
        if not self._picks(layer, row):
            return len(row.blocks)
        return self._plan.attended_blocks + len(row.blocks) - row.full

    def _picks(self, layer: int, row: BatchRow) -> bool:
        return row.picks and layer >= self._plan.dense_layers

    def _gathered(self, layer: int, rows: list[BatchRow], query: Tensor) -> Part:
        """The rows' blocks, in the workspace, one row after another."""
        lengths, counts = [], []
        at = 0
        for row in rows:
            room = self._workspace[at:]
            count = (
                self._pick(layer, row, query, room)
                if self._picks(layer, row)
                else self._stage(layer, row, room)
            )
            lengths.append(row.length - (len(row.blocks) - count) * self._plan.block_tokens)
            counts.append(count)
            at += count
        table = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
        at = 0
        for i, count in enumerate(counts):
            table[i, :count] = torch.arange(at, at + count, dtype=torch.int32)
            at += count
        return self._part(rows, self._workspace[:at], lengths, table)

    def _stage(self, layer: int, row: BatchRow, room: Tensor) -> int:
        """All blocks of a row. Returns how many."""
        assert row.context is not None
        slots = row.context.slots(len(row.blocks))
        self._pages.copy(room, self._pages.addresses(layer, row.blocks, slots))
        self._count(staged_blocks=int(np.count_nonzero(slots)))
        return len(row.blocks)

    def _pick(self, layer: int, row: BatchRow, query: Tensor, room: Tensor) -> int:
        """The blocks that the row's query picks, and the newest, which is not full. Returns how many."""
        assert row.context is not None
        plan, heads = self._plan, self._pages.heads
        grouped = query[row.tokens[0]].view(heads, -1, self._dim)
        scores = self._selector.score(grouped, row.context.summaries(layer, row.full))
        picked = select(scores, plan.budget_blocks, plan.first_blocks, plan.window_blocks).numpy()
        slots = row.context.slots(len(row.blocks))
        addresses = self._pages.addresses(layer, row.blocks, slots)
        if picked.shape[1] == 1:
            self._pages.copy(room, addresses[picked[:, 0]])
        else:
            self._pages.copy_pieces(room, addresses[picked])
        count = len(picked)
        self._pages.copy(room[count:], addresses[row.full :])
        pieces = heads // picked.shape[1]
        arena = pieces * int(np.count_nonzero(slots[picked]))
        self._count(
            asked_pieces=pieces * picked.size,
            pool_pieces=pieces * picked.size - arena,
            arena_pieces=arena,
            arena_read_bytes=arena * self._pages.piece_bytes,
        )
        return count + len(row.blocks) - row.full

    def _part(self, rows: list[BatchRow], cache: Tensor | None, lengths: list[int], table: Tensor) -> Part:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.tokens))
        return Part(
            torch.cat([torch.arange(row.tokens.start, row.tokens.stop) for row in rows]),
            cache,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            table,
        )

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
