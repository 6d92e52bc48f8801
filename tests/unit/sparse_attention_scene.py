"""A worker in small: requests with true rows, a paged cache, an arena in this process's memory, and steps
of a model of nothing but attention. What every step's attention gives is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvsieve_connector.kernels.gather_context_reference import to_bf16
from kvsieve_connector.kernels.tables import COUNTERS, LayerCache
from kvsieve_connector.sparse.kernel_set import KernelSet, kernel_set
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.prefetch import make_policy
from kvsieve_connector.sparse.runtime import BatchRow, SparseRuntime
from kvsieve_connector.sparse.tables import HostTables, TableSizes
from tests.unit.stock_attention import HEADS, WIDTH, Common, FlashMLA, PackedFlashMLA, attend

CPU = torch.device("cpu")
LAYERS, GROUPS = 4, 2
LEADERS = (0, 0, 2, 2)
"""Layers 1 and 3 use the lists of 0 and 2."""
BLOCKS, SLOTS, ROWS = 24, 4, 8
HEADER = 48
"""Bytes of a slot before the first layer's rows."""
GARBAGE = 0xFF
"""A byte that makes NaN in every format."""

Pick = Callable[[str, int, int], list[int]]
"""(request, layer, position of the query) -> positions to attend to."""


@dataclass
class Live:
    """truth: uint8 [layers, tokens, row bytes]. blocks: per group, the block table. hot: whether it is
    host-backed. slots: arena slots of its blocks. lists: per layer, what the newest query attended to. hint:
    what was hot when it was preempted."""

    name: str
    truth: torch.Tensor
    blocks: list[list[int]]
    computed: int = 0
    hot: tuple[tuple[int, ...], ...] | None = None
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    lists: dict[int, list[int]] = field(default_factory=dict)
    hint: torch.Tensor | None = None


class Scene:
    """face: "common", "flashmla" or "flashmla-fp8". workspace_blocks: that gathered contexts may take.
    drafter: whether the last layer is a drafter's, with a list of its own."""

    def __init__(
        self,
        face: str = "common",
        policy: str = "none",
        *,
        topk: int = 4,
        query_tokens: int = 1,
        hot_blocks: int = 3,
        workspace_blocks: int = BLOCKS,
        drafter: bool = False,
        kernels: Callable[[KernelSet], KernelSet] = lambda kernels: kernels,
    ) -> None:
        packed = face == "flashmla-fp8"
        self.block, self.row_bytes = (64, 656) if packed else (4, 1152)
        self.topk, self.query_tokens, self.drafter = topk, query_tokens, drafter
        self.leaders = (*LEADERS[:-1], LAYERS - 1) if drafter else LEADERS
        self.rng, self.random = random.Random(0), torch.Generator().manual_seed(0)
        per_group = LAYERS // GROUPS
        self.pool = torch.full((160, per_group, self.block, self.row_bytes), GARBAGE, dtype=torch.uint8)
        self._free = list(range(1, len(self.pool)))
        self.slot_bytes = HEADER + LAYERS * self.block * self.row_bytes
        sizes = TableSizes(
            SLOTS, BLOCKS, SLOTS * BLOCKS + 1, GROUPS, hot_blocks, LAYERS, self.block, rows=ROWS
        )
        self.tables = HostTables(sizes, CPU)
        self.names = [f"layers.{i}.attn" for i in range(LAYERS)]
        self.caches = [self._layer_cache(layer) for layer in range(LAYERS)]
        plan = SparsePlan(self.block, topk, query_tokens, hot_blocks, 1, self.row_bytes)
        leaders = self.leaders if policy == "index-share" else None
        workspace_rows = workspace_blocks * self.block
        self.runtime = SparseRuntime(
            plan,
            self.tables,
            dict(zip(self.names, self.caches, strict=True)),
            kernels(kernel_set(CPU)),
            make_policy(policy, LAYERS, leaders=leaders),
            workspace_rows,
            LAYERS - drafter,
        )
        self._topk = torch.full((1024, topk), -1, dtype=torch.int32)
        self.impls: list[Any] = []
        for layer, leader in enumerate(self.leaders):
            if face == "common":
                self.impls.append(Common(self._topk, None if leader == layer else self.impls[leader]))
            else:
                self.impls.append((PackedFlashMLA if packed else FlashMLA)(self._topk, workspace_rows))
        for name, impl in zip(self.names, self.impls, strict=True):
            impl.host = self.runtime.layers[name]
        self.live: dict[str, Live] = {}
        self._of_leader: dict[tuple[str, int, int], list[int]] = {}
        """(request, layer, position) -> list of that query."""

    def _layer_cache(self, layer: int) -> LayerCache:
        tables = self.tables
        return LayerCache(
            cache=self.pool[:, layer // GROUPS],
            layer_offset=HEADER + layer * self.block * self.row_bytes,
            group=layer % GROUPS,
            slot_of=tables.slot_of[layer],
            tag=tables.tag[layer],
            stamp=tables.stamp[layer],
            clock=tables.clock[layer],
            counters=tables.counters[layer],
        )

    # What happens to requests

    def start(self, name: str, tokens: int, matched: int = 0) -> None:
        """A request of `tokens` tokens in the end, which begins with `matched` blocks of the store."""
        truth = torch.randint(64, (LAYERS, tokens, self.row_bytes), dtype=torch.uint8, generator=self.random)
        if self.row_bytes == 1152:
            values = torch.randn(LAYERS, tokens, WIDTH, generator=self.random)
            truth = values.to(torch.bfloat16).view(torch.uint8)
        live = self.live[name] = Live(name, truth, [[] for _ in range(GROUPS)])
        self._begin(live, matched)

    def _begin(self, live: Live, matched: int) -> None:
        blocks = -(-live.truth.shape[1] // self.block)
        for group in range(GROUPS):
            live.blocks[group] = [0] * matched + self._take(blocks - matched)
        live.computed = matched * self.block
        if matched:
            self.back(live.name)
            self.lose(live.name, *range(matched))

    def fill(self, name: str, tokens: int) -> None:
        """The request's first `tokens` tokens are computed, on the GPU."""
        rows = [BatchRow(name, 0, tokens)]
        for layer in range(LAYERS):
            self._write(layer, rows)
        self.live[name].computed = tokens

    def back(self, name: str) -> None:
        """The request gets its hot blocks."""
        live, sizes = self.live[name], self.tables.sizes
        live.hot = tuple(tuple(self._take(sizes.hot_blocks)) for _ in range(GROUPS))
        self.tables.begin(name, live.hot)

    def lose(self, name: str, *blocks: int) -> None:
        """These blocks are read from the arena from now on; their places on the GPU hold garbage."""
        live = self.live[name]
        for block in blocks:
            slot = live.slots[block] = torch.full((self.slot_bytes,), GARBAGE, dtype=torch.uint8)
            rows = live.truth[:, block * self.block : (block + 1) * self.block]
            slot[HEADER:] = rows.reshape(-1)
            for group in range(GROUPS):
                self.pool[live.blocks[group][block]] = GARBAGE
        self.tables.add(name, [(block, live.slots[block].data_ptr()) for block in blocks])

    def preempt(self, name: str) -> None:
        """All of its blocks go to others; which rows were hot is kept."""
        live = self.live[name]
        if self.runtime.warm is not None:
            live.hint = self.runtime.warm.hot_rows(name)
        self.tables.end(name)
        for table in (*live.blocks, *(live.hot or ())):
            self.pool[list(table)] = GARBAGE
            self._free += [block for block in table if block]
        live.slots.clear()
        live.hot = None

    def resume(self, name: str) -> None:
        """A preempted request comes back: its full blocks are matched in the store."""
        live = self.live[name]
        self._begin(live, live.computed // self.block)
        if self.runtime.warm is not None and live.hint is not None:
            self.runtime.warm.resume(name, live.hint)

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    # A step

    def step(
        self,
        decodes: Sequence[str] = (),
        prefills: Mapping[str, int] | None = None,
        *,
        padding: int = 0,
        pick: Pick | None = None,
        tokens: int | None = None,
        accepted: Mapping[str, int] | None = None,
    ) -> list[torch.Tensor]:
        """One forward: decode rows, `padding` rows of nobody, prefill chunks; then what a drafter runs by
        itself. Returns what attention gave, per layer; raises AssertionError when that is not attention over
        the true rows.

        tokens: of each decode row, if not query_tokens. accepted: how many of a request's stay, if not all.
        """
        assert not (padding and prefills), "vLLM pads batches of decodes"
        each = tokens or self.query_tokens
        counts = dict.fromkeys(decodes, each) | dict(prefills or {})
        batch = [BatchRow(name, self.live[name].computed, count) for name, count in counts.items()]
        self.runtime.begin(batch)
        outputs = [
            self._layer(layer, batch, len(decodes), padding, pick, each=each) for layer in range(LAYERS)
        ]
        kept = counts | dict(accepted or {})
        for ahead in range(self.query_tokens - 2 if self.drafter else 0):
            drafts = [BatchRow(row.req_id, row.computed + kept[row.req_id] + ahead, 1) for row in batch]
            outputs.append(self._layer(LAYERS - 1, drafts, len(drafts), padding, pick, each=1))
        for row in batch:
            self.live[row.req_id].computed += kept[row.req_id]
            self._overwrite_rest(self.live[row.req_id])
        return outputs

    def _overwrite_rest(self, live: Live) -> None:
        """Rows of rejected drafts, and of the drafter's own, are worth nothing: the next step writes them."""
        for position in range(live.computed, min(live.computed + 8, live.truth.shape[1])):
            for group in range(GROUPS):
                block = live.blocks[group][position // self.block]
                self.pool[block, :, position % self.block] = GARBAGE

    def _layer(
        self,
        layer: int,
        batch: list[BatchRow],
        decodes: int,
        padding: int,
        pick: Pick | None,
        *,
        each: int,
    ) -> torch.Tensor:
        self._write(layer, batch)
        lists = self._lists(layer, batch, pick)
        tokens = len(lists)
        padded = tokens + padding * each
        self._topk.fill_(3)  # of padding rows: left by another batch
        self._topk[:tokens] = torch.tensor(
            [found + [-1] * (self.topk - len(found)) for _, found in lists], dtype=torch.int32
        )
        q = torch.randn(padded, HEADS, WIDTH, generator=self.random).to(torch.bfloat16)
        cache = self.caches[layer].cache
        out, lse = self.impls[layer].forward_mqa(
            (q[..., :512], q[..., 512:]),
            cache.view(torch.bfloat16) if self.row_bytes == 1152 else cache,
            self._metadata(layer % GROUPS, batch, decodes, padding, each),
            SimpleNamespace(layer_name=self.names[layer]),
        )
        assert lse is None
        assert out.shape == (padded, HEADS, 512)
        torch.testing.assert_close(out[:tokens], self._expected(layer, lists, q), atol=2e-2, rtol=2e-2)
        return out[:tokens].clone()

    def _write(self, layer: int, batch: list[BatchRow]) -> None:
        for row in batch:
            live = self.live[row.req_id]
            for position in range(row.computed, row.computed + row.scheduled):
                block = live.blocks[layer % GROUPS][position // self.block]
                self.caches[layer].cache[block, position % self.block] = live.truth[layer, position]

    def _lists(self, layer: int, batch: list[BatchRow], pick: Pick | None) -> list[tuple[Live, list[int]]]:
        """Of each token: its request, and the positions that it attends to."""
        lists = []
        for row in batch:
            live = self.live[row.req_id]
            for position in range(row.computed, row.computed + row.scheduled):
                if pick is not None:
                    found = pick(row.req_id, layer, position)
                elif self.leaders[layer] != layer:
                    found = self._of_leader[row.req_id, self.leaders[layer], position]
                else:
                    found = self._pick(live, layer, position)
                self._of_leader[row.req_id, layer, position] = live.lists[layer] = found
                lists.append((live, found))
        return lists

    def _pick(self, live: Live, layer: int, position: int) -> list[int]:
        """Half of them as the last time; sometimes fewer than there is room for."""
        count = min(self.topk, position + 1)
        if self.rng.random() < 0.2:
            count = self.rng.randint(1, count)
        old = [p for p in live.lists.get(layer, ()) if p <= position]
        kept = self.rng.sample(old, min(count // 2, len(old)))
        others = [p for p in range(position + 1) if p not in kept]
        return kept + self.rng.sample(others, count - len(kept))

    def _metadata(self, group: int, batch: list[BatchRow], decodes: int, padding: int, each: int) -> Any:
        """What vLLM's builder makes of the batch, of one KV group."""
        names = [row.req_id for row in batch]
        table = torch.full((len(names) + padding, BLOCKS), 1, dtype=torch.int32)
        for row, name in enumerate(names):
            blocks = self.live[name].blocks[group]
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts = [row.scheduled for row in batch] + [each] * padding
        decoding = decodes + padding if decodes else 0
        return SimpleNamespace(
            block_table=table,
            block_size=self.block,
            num_decodes=decoding,
            num_decode_tokens=decoding * each,
            num_actual_tokens=sum(counts),
            req_id_per_token=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
            fp8_extra_metadata=SimpleNamespace(decode=SimpleNamespace(kernel_metadata="decode")),
        )

    def _expected(self, layer: int, lists: list[tuple[Live, list[int]]], q: torch.Tensor) -> torch.Tensor:
        """Dense attention over the true rows, of which only those of the list are seen."""
        outputs = []
        for token, (live, found) in enumerate(lists):
            truth = to_bf16(live.truth[layer]).unsqueeze(0)
            seen = torch.zeros(1, truth.shape[1], dtype=torch.bool)
            seen[0, found] = True
            outputs.append(attend(q[token : token + 1], truth, seen))
        return torch.cat(outputs)

    # What a test looks at

    def counts(self, layer: int | None = None) -> dict[str, int]:
        """The counters of a layer, or of all."""
        counters = self.tables.counters if layer is None else self.tables.counters[layer : layer + 1]
        return dict(zip(COUNTERS, counters.sum((0, 1)).tolist(), strict=True))

    def hot_positions(self, name: str, layer: int) -> set[int]:
        """Positions whose rows the request's hot buffer holds in the layer."""
        block_of = {page: block for block, page in self.tables.pages_of(name).items()}
        tags = [tag for tag in self.tables.tag[layer, self.tables.slot(name)].tolist() if tag >= 0]
        return {block_of[tag // self.block] * self.block + tag % self.block for tag in tags}
