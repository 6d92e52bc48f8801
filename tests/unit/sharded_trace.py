"""Ranks that fetch for one another, in small: traces of the same requests, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvsieve_connector.kernels.tables import Peers, owner
from tests.unit.swap_in_trace import BLOCK_TOKENS, Call, Face, Size, Trace

Run = Callable[[list[Trace], list[Call]], list[tuple[int, int]]]
"""Makes the calls, one of each rank. Returns (reader, owner) of ranks: who had published in time for whom."""


class Ranks:
    """All that happens to a trace happens to each; what is hot on which is up to them. A rank whose layer has
    no `peers` fetches for itself."""

    def __init__(self, faces: Sequence[Face], size: Size, seed: int, patience_ns: int) -> None:
        self.traces = [Trace(face, size, seed) for face in faces]
        self.rng = np.random.default_rng(seed + 1)
        self.expected = [{"peer_rows": 0, "late_rows": 0} for _ in faces]
        self.changes = 0
        count = len(faces)
        flags = [
            torch.zeros(size.slots, count, dtype=torch.int64, device=trace.face.device)
            for trace in self.traces
        ]
        places = [
            [trace.layer.cache.data_ptr(), trace.layer.slot_of.data_ptr(), own.data_ptr()]
            for trace, own in zip(self.traces, flags, strict=True)
        ]
        self.peers = []
        for rank, trace in enumerate(self.traces):
            device = trace.face.device
            peers = Peers(
                rank,
                torch.tensor(places, dtype=torch.int64, device=device),
                flags[rank],
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.zeros(count, dtype=torch.int32, device=device),
                patience_ns,
            )
            self.peers.append(peers)
            trace.layer = replace(trace.layer, peers=peers)

    def change(self) -> None:
        """Something happens to the requests, and the tables are marked anew."""
        self.changes += 1
        for trace, peers in zip(self.traces, self.peers, strict=True):
            trace.change()
            peers.mark.fill_(self.changes << 32)

    def admit(self) -> None:
        for trace in self.traces:
            trace.admit()

    def prefetch(self, rank: int) -> None:
        """One rank alone makes some rows hot."""
        trace = self.traces[rank]
        rows = list(trace.blocks)[: trace.size.batch]
        most = [len(trace.blocks[s]) * BLOCK_TOKENS for s in rows]
        width = min(trace.size.k, trace.size.hot_rows)
        trace.prefetch(rows, np.stack([self.rng.integers(0, n, width) for n in most]).astype(np.int32))

    def step(self, run: Run, fresh: float = 0.15) -> None:
        """One call on each rank, for the same requests and positions."""
        calls = [trace.prepare(*trace.draw(fresh)) for trace in self.traces]
        published = run(self.traces, calls)
        for rank, (trace, call) in enumerate(zip(self.traces, calls, strict=True)):
            for row in trace.missing if trace.layer.peers is not None else ():
                whose = owner(row, len(self.traces))
                if whose != rank:
                    self.expected[rank]["peer_rows" if (rank, whose) in published else "late_rows"] += 1
            trace.check(call)
            for name, count in self.expected[rank].items():
                assert trace.counter(name) == count, (rank, name)


def run_ranks(ranks: Ranks, run: Run, steps: int, diverge: float = 0.3) -> None:
    """A random trace, checked after every step. diverge: how often the hot buffers are made to differ."""
    size = ranks.traces[0].size
    for step in range(steps):
        ranks.change()
        while len(ranks.traces[0].blocks) < min(size.batch, 2 * step):
            ranks.admit()
        for rank in range(len(ranks.traces)):
            if ranks.rng.random() < diverge:
                ranks.prefetch(rank)
        ranks.step(run, fresh=1.0 if step % 50 == 49 else 0.15)


def all_pairs(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(count) if a != b]
