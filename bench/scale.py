"""A plan on paper, simulated: what 1, 8, 64 and 1,000 hosts move, ask and keep, and what is full first.

Nothing is timed: the same numbers come out on any machine. docs/scale.md says where the assumptions are from.
Requests arrive at random (fixed seed), each a document that others ask about, too, and a text of its own. A
prefill host computes what no store has, blocks stream to the decode host meanwhile, and every store keeps the
documents that it has seen until its arena is full. Links have no limit here: what they would have to carry is
counted, and held against them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench.report import Report

HOSTS = (1, 8, 64, 1_000)


@dataclass(frozen=True)
class Assumptions:
    """Rates in 1/s, sizes in bytes, lengths in tokens."""

    token_bytes: int = 61 * (656 + 132)
    """DeepSeek-V3.2: 61 layers, a row of 656 B in the main plane and one of 132 B in the indexer's."""
    block_tokens: int = 64
    document_tokens: int = 24_000
    own_tokens: int = 8_000
    answer_tokens: int = 1_000
    documents_per_host: int = 400
    """How many different documents are asked about, by hosts. A few of them often: Zipf, exponent 1."""
    requests_per_host: float = 1.0
    """Of all hosts, prefill and decode: prefill computes 80 % of the time."""
    prefill_tokens_s: float = 30_000
    """What one prefill host computes; half of the hosts are prefill hosts."""
    step_tokens: int = 8_192
    arena_bytes: float = 1e12
    nic_bytes_s: float = 400e9 / 8
    """Of one host, each way."""
    leaf_hosts: int = 32
    oversubscription: float = 2.0
    """A leaf's uplinks carry this fraction (1/x) of its hosts' links."""
    directory_ttl_s: float = 3_600
    directory_entry_bytes: int = 180
    """A block and holder."""
    directory_bytes: float = 64e9
    """Memory of one directory server."""
    directory_ops_s: float = 500_000
    """Single-key commands of one server, pipelined."""
    look_up_keys: int = 150
    store_rpcs_s: float = 1_000
    proxy_events_s: float = 12_000
    """Pieces of streams that one proxy process carries."""
    warm_s: float = 1_200
    measured_s: float = 60
    bin_s: float = 0.1


@dataclass
class Store:
    """One host's. documents: by last use; capacity in tokens."""

    capacity: float
    documents: OrderedDict[int, None] = field(default_factory=OrderedDict)
    dropped_blocks: int = 0

    def has(self, document: int) -> bool:
        if document not in self.documents:
            return False
        self.documents.move_to_end(document)
        return True


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.scale", __doc__, arguments)
    save(simulate(Assumptions()))


def simulate(given: Assumptions, hosts: tuple[int, ...] = HOSTS) -> Report:
    """A row per number of hosts."""
    return Report("scale", asdict(given), [_Run(given, number).row() for number in hosts])


class _Run:
    """Hosts 0 to p - 1 prefill, the others decode; a single host does both. Host h is on leaf h % leaves."""

    def __init__(self, given: Assumptions, hosts: int) -> None:
        self.given, self.hosts = given, hosts
        self.prefill = max(hosts // 2, 1)
        self.leaves = math.ceil(hosts / given.leaf_hosts)
        self.bins = int(given.measured_s / given.bin_s)
        # Bytes in each bin: links of hosts, out and in; uplinks of leaves, up and down.
        self.out, self.into = np.zeros((hosts, self.bins)), np.zeros((hosts, self.bins))
        self.up, self.down = np.zeros((self.leaves, self.bins)), np.zeros((self.leaves, self.bins))
        self.stores = [Store(given.arena_bytes / given.token_bytes) for _ in range(hosts)]
        self.holders: dict[int, set[int]] = {}
        self.sealed_blocks = self.look_ups = self.computed = self.reused = self.fetched = self.requests = 0
        self.rpcs = np.zeros(hosts)
        self.waits: list[float] = []
        self._play()

    def _play(self) -> None:
        given, random = self.given, np.random.default_rng(self.hosts)
        until = given.warm_s + given.measured_s
        count = int(until * self.hosts * given.requests_per_host)
        times = np.sort(random.uniform(0, until, count))
        number = given.documents_per_host * self.hosts
        weights = 1 / np.arange(1, number + 1)
        documents = random.choice(number, count, p=weights / weights.sum())
        decode = random.integers(self.prefill, self.hosts, count) if self.hosts > 1 else np.zeros(count, int)
        sources = random.random(count)
        # The prefill host that is free first: what a proxy's fewest requests come to.
        free = [(0.0, host) for host in range(self.prefill)]
        for now, document, target, pick in zip(times, documents, decode, sources, strict=True):
            ready, host = heapq.heappop(free)
            start = max(float(now), ready)
            end = self._request(start, int(document), host, int(target), float(pick))
            if self._counts(start):
                self.waits.append(start - float(now))
            heapq.heappush(free, (end, host))

    def _request(self, start: float, document: int, host: int, target: int, pick: float) -> float:
        """When prefill is done."""
        given = self.given
        store, length = self.stores[host], given.document_tokens
        found = store.has(document)
        others = () if found else sorted(self.holders.get(document, ()))
        tokens = given.own_tokens + (0 if found or others else length)
        end = start + tokens / given.prefill_tokens_s
        if others:
            self._flow(others[int(pick * len(others))], host, length, start, end)
        missing = given.own_tokens + (0 if target == host or self.stores[target].has(document) else length)
        if target != host:
            self._flow(host, target, missing, start, end)
        for at in {host, target}:
            self._keep(at, document)
        if self._counts(start):
            self.requests += 1
            self.computed += tokens
            self.reused += 0 if tokens > given.own_tokens else length
            self.fetched += length if others else 0
            self.look_ups += given.look_up_keys * (not found)
            new = tokens + (length if others else 0) + (missing if target != host else 0)
            self.sealed_blocks += new // given.block_tokens
            steps = math.ceil(tokens / given.step_tokens)
            # Match and release, a seal a step; an offer and its end for each step that the peer waits for.
            self.rpcs[host] += 2 + steps + 2 * (steps + 1) * (target != host)
            self.rpcs[target] += 3 * (target != host)
        return end

    def _counts(self, start: float) -> bool:
        return 0 <= start - self.given.warm_s < self.given.measured_s

    def _keep(self, at: int, document: int) -> None:
        """The document, and the request's own text, which nobody asks for again and which goes first."""
        store = self.stores[at]
        store.documents[document] = None
        self.holders.setdefault(document, set()).add(at)
        while len(store.documents) * self.given.document_tokens > store.capacity / 2:
            gone, _ = store.documents.popitem(last=False)
            self.holders[gone].discard(at)
            store.dropped_blocks += self.given.document_tokens // self.given.block_tokens

    def _flow(self, source: int, target: int, tokens: int, start: float, end: float) -> None:
        """Evenly over [start, end], seconds; on both hosts' links, and on uplinks between leaves."""
        given = self.given
        first, last = ((t - given.warm_s) / given.bin_s for t in (start, end))
        edges = np.arange(max(int(first), 0), min(math.ceil(last), self.bins))
        if not len(edges):
            return
        shares = (np.minimum(edges + 1, last) - np.maximum(edges, first)) / (last - first)
        sent = shares * tokens * given.token_bytes
        self.out[source, edges] += sent
        self.into[target, edges] += sent
        if source % self.leaves != target % self.leaves:
            self.up[source % self.leaves, edges] += sent
            self.down[target % self.leaves, edges] += sent

    def row(self) -> dict[str, Any]:
        given, seconds = self.given, self.given.measured_s
        # An uplink is as wide as its leaf's hosts together, less the oversubscription.
        on_leaf = math.ceil(self.hosts / self.leaves)
        uplink = on_leaf * given.nic_bytes_s / given.oversubscription
        nic, trunk = np.concatenate([self.out, self.into]), np.concatenate([self.up, self.down])
        to_gb_s = 1 / given.bin_s / 1e9
        # Arenas fill up in the end, and everything in them is announced again and again.
        kept = self.hosts * given.arena_bytes / given.token_bytes / given.block_tokens
        refreshes = kept * 3 / given.directory_ttl_s
        announced = self.sealed_blocks / seconds
        # Each announcement adds to a set and sets its time; what comes in, full arenas drop.
        ops = 2 * refreshes + 3 * announced + self.look_ups / seconds
        memory = kept * given.directory_entry_bytes
        events = self.requests / seconds * given.answer_tokens
        full = {
            "prefill compute": self.computed / seconds / self.prefill / given.prefill_tokens_s,
            "host links": float(np.percentile(nic, 99)) / given.bin_s / given.nic_bytes_s,
            "leaf uplinks": float(np.percentile(trunk, 99)) / given.bin_s / uplink
            if self.leaves > 1
            else 0.0,
            "one directory: commands": ops / given.directory_ops_s if self.hosts > 1 else 0.0,
            "one directory: memory": memory / given.directory_bytes if self.hosts > 1 else 0.0,
            "control calls of a store": float(self.rpcs.max()) / seconds / given.store_rpcs_s,
            "one proxy": events / given.proxy_events_s if self.hosts > 1 else 0.0,
        }
        return {
            "hosts": self.hosts,
            "requests_s": round(self.requests / seconds, 2),
            "reused_tokens": round(self.reused / max(self.reused + self.computed, 1), 3),
            "fetched_tokens": round(self.fetched / max(self.reused + self.computed, 1), 3),
            "prefill_wait_p99_s": round(float(np.percentile(self.waits, 99)), 2),
            "prefill_out_gb_s": round(float(self.out[: self.prefill].mean()) * to_gb_s, 2),
            "decode_in_gb_s": round(float(self.into[self.prefill :].mean()) * to_gb_s, 2)
            if self.hosts > 1
            else 0.0,
            "host_link_p99_gb_s": round(float(np.percentile(nic, 99)) * to_gb_s, 2),
            "host_link_peak_gb_s": round(float(nic.max()) * to_gb_s, 2),
            "uplink_p99_gb_s": round(float(np.percentile(trunk, 99)) * to_gb_s, 2),
            "directory_blocks": round(kept),
            "directory_ops_s": round(ops),
            "directory_refresh_ops_s": round(2 * refreshes),
            "directory_look_up_ops_s": round(self.look_ups / seconds),
            "directory_gb": round(memory / 1e9, 2),
            "store_rpcs_s": round(float(self.rpcs.mean()) / seconds, 2),
            "proxy_events_s": round(events),
            "used": {name: round(share, 4) for name, share in full.items()},
            "full_first": max(full, key=lambda name: full[name]),
        }


if __name__ == "__main__":
    main()
