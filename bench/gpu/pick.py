"""Time of a dense model's picking, per layer in a CUDA graph: scores, look-up, and what is fetched.

Every request has a context that lies in pinned host memory whole. Two queries that rank its blocks the other
way round take turns, or the same one comes again: then all that is picked is missing, or none of it. A third
case has all blocks in the pool, as for a request that is not host-backed. At the end, the pieces of the last
list are compared with the host's, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from bench.gpu.events import median_us
from bench.gpu.swap_in import link_gb_s
from bench.gpu.table import device as about_device
from bench.gpu.table import tell
from kvsieve_connector.dense.selectors import DEFAULT
from kvsieve_connector.kernels.block_tables import (
    COUNTERS,
    SELECTORS,
    BlockTables,
    LayerBlocks,
    Picks,
    vectors_of,
)
from kvsieve_store.bench.report import Goal, Report

HEADS, GROUP, DIM, TOKENS = 8, 4, 128, 16
BUDGET = 64
"""Blocks; of all KV heads together 64 KiB each."""
LAYERS = 4
"""Of a graph, so that a layer's tables are not those of the call before."""
CALLS, REPLAYS = 8, 20
FETCH_GOAL = 45.0
"""GB/s, 64 blocks of 64 KiB of one request."""


@dataclass
class Scene:
    """batch requests of so many blocks each. host: [LAYERS, batch * blocks, HEADS, TOKENS, 2 * DIM]."""

    batch: int
    blocks: int
    in_pool: bool
    selector: str

    def __post_init__(self) -> None:
        device, dtype, batch = torch.device("cuda"), torch.bfloat16, self.batch
        self.picks = Picks(self.selector, BUDGET, 1, 2, DIM**-0.5)
        hot = self.picks.listed
        pages = batch * self.blocks
        one = torch.randn((pages, HEADS, TOKENS, 2 * DIM), device=device).to(dtype).cpu()
        self.host = torch.empty((LAYERS, *one.shape), dtype=dtype, pin_memory=True)
        for layer in range(LAYERS):
            self.host[layer] = one.roll(layer, -1)
        num_blocks = 1 + batch * (hot + 8)
        block_bytes = self.host[0, 0].numel() * 2

        def ids(*shape: int, first: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return torch.arange(first, first + count, dtype=dtype, device=device).view(shape)

        address = self.host.data_ptr() + ids(batch, self.blocks, dtype=torch.int64) * block_bytes
        self.tables = BlockTables(
            row_slot=torch.full((batch,), -1, dtype=torch.int32, device=device)
            if self.in_pool
            else ids(batch),
            page=ids(batch, self.blocks),
            address=address,
            hot_blocks=ids(batch, hot, first=1),
        )
        self.newest = ids(batch, first=1 + batch * hot)
        self.block_table = self.newest.unsqueeze(1).repeat(1, self.blocks)
        means = torch.randn((LAYERS, HEADS, pages, DIM), device=device).to(dtype)
        summaries = means.repeat(1, 1, 1, vectors_of(self.selector, TOKENS))
        pool = torch.zeros((num_blocks, LAYERS, HEADS, TOKENS, 2 * DIM), dtype=dtype, device=device)
        self.layers = [
            LayerBlocks(
                cache=pool[:, layer],
                layer_offset=layer * self.host[0].numel() * 2,
                summaries=summaries[layer],
                tag=torch.full((batch, HEADS, hot), -1, dtype=torch.int32, device=device),
                stamp=torch.zeros((batch, HEADS, hot), dtype=torch.int32, device=device),
                clock=torch.zeros((batch, HEADS), dtype=torch.int32, device=device),
                counters=torch.zeros((batch, len(COUNTERS)), dtype=torch.int64, device=device),
            )
            for layer in range(LAYERS)
        ]
        query = torch.randn((batch, HEADS, 1, DIM), device=device).repeat(1, 1, GROUP, 1)
        self.queries = [q.reshape(batch, HEADS * GROUP, DIM).to(dtype) for q in (query, -query)]
        length = (self.blocks - 1) * TOKENS + 3
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.out = torch.zeros((batch * HEADS, self.blocks), dtype=torch.int32, device=device)
        self.out_lengths = torch.zeros(batch * HEADS, dtype=torch.int32, device=device)
        self.out_query = torch.zeros((batch * HEADS, GROUP, DIM), dtype=dtype, device=device)

    def call(self, layer: int, query: torch.Tensor) -> None:
        from kvsieve_connector.kernels.pick_blocks import pick_blocks

        pick_blocks(
            self.layers[layer],
            self.tables,
            self.picks,
            query,
            self.lengths,
            self.block_table,
            self.out,
            self.out_lengths,
            self.out_query,
            write_whole=layer == 0,
        )

    def missed(self) -> int:
        """Pieces fetched since the start."""
        at = COUNTERS.index("arena_pieces")
        return sum(int(layer.counters[:, at].sum()) for layer in self.layers)

    def check(self) -> None:
        """The last call was for the last layer. Raises RuntimeError when pieces are not the host's."""
        if self.in_pool:
            return
        layer = self.layers[-1]
        count = self.picks.listed
        at = self.out[:, :count].cpu().long()
        block, rest = at // layer.stride_pieces, at % layer.stride_pieces
        tag = layer.tag.cpu()
        for row in range(self.batch * HEADS):
            request, head = divmod(row, HEADS)
            hot = block[row] - int(self.tables.hot_blocks[request, 0])
            pages = request * self.blocks + tag[request, head, hot].long()
            found = layer.cache[block[row].to(layer.cache.device), head].cpu()
            if not torch.equal(found, self.host[-1, pages, head]) or not bool((rest[row] == head).all()):
                raise RuntimeError(f"pieces of request {request}, KV head {head}, are not the host's")


def measure(
    *,
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (32_768,),
    selectors: Sequence[str] = (DEFAULT,),
) -> Report:
    link = link_gb_s(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for selector, context, batch in product(selectors, contexts, batches):
        picked = 0.0
        for case in ("in the pool", "all hot", "all missing"):
            rows.append(_row(case, selector, batch, context, link, picked))
            picked = rows[-1]["us"]
    parameters = {
        "kv_heads": HEADS,
        "group": GROUP,
        "dim": DIM,
        "block_tokens": TOKENS,
        "budget_blocks": BUDGET,
    }
    parameters |= {"layers": LAYERS, "link_gb_s": round(link, 1), **about_device()}
    goals = [
        Goal(f"64 blocks of 64 KiB, {name}", row[column], FETCH_GOAL, "GB/s")
        for row in rows
        if (row["selector"], row["batch"], row["case"]) == (DEFAULT, 1, "all missing")
        for name, column in (("without the scores", "fetch_gb_s"), ("with them", "all_gb_s"))
    ]
    return Report("gpu-pick", parameters, rows, goals)


def _row(case: str, selector: str, batch: int, context: int, link: float, picked: float) -> dict[str, Any]:
    """picked: what the same takes with nothing missing, in microseconds."""
    scene = Scene(batch, context // TOKENS, case == "in the pool", selector)
    queries = scene.queries if case == "all missing" else scene.queries[:1]

    def calls() -> None:
        for number in range(CALLS):
            for layer in range(LAYERS):
                scene.call(layer, queries[number % len(queries)])

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    before = scene.missed()
    us = median_us(graph.replay, REPLAYS) / CALLS / LAYERS
    missed = (scene.missed() - before) / REPLAYS / CALLS / LAYERS
    scene.check()
    row = {"case": case, "selector": selector, "batch": batch, "context": context, "us": round(us, 2)}
    row |= {"missed_pieces": round(missed / batch / HEADS, 1)}
    size = missed * TOKENS * 2 * DIM * 2
    if missed:
        row["all_gb_s"] = round(size / us / 1e3, 1)
        row["fetch_gb_s"] = round(size / (us - picked) / 1e3, 1)
        row["of_link"] = round(size / (us - picked) / 1e3 / link, 3)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu pick", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768], help="tokens of a request")
    parser.add_argument("--selectors", nargs="+", default=[DEFAULT], choices=sorted(SELECTORS))
    args = parser.parse_args(arguments)
    tell(measure(batches=args.batches, contexts=args.contexts, selectors=args.selectors))


if __name__ == "__main__":
    main()
