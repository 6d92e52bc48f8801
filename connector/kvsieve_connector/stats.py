"""What the connector counts, for vLLM's log line and its Prometheus endpoint (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "asked_blocks": "Blocks of prompts that the store was asked for",
    "matched_blocks": "Blocks that the store had and that were loaded or are being loaded",
    "fetched_blocks": "Blocks that the store brought from other stores for matches",
    "loaded_blocks": "Blocks copied from the arena to the paged cache",
    "loaded_bytes": "Bytes copied from the arena to the paged cache, by all ranks",
    "load_seconds": "Time spent copying from the arena to the paged cache, by all ranks",
    "failed_loads": "Loads that failed and were recomputed, counted by each rank that failed",
    "saved_blocks": "Blocks that were sealed in the store",
    "saved_bytes": "Bytes copied from the paged cache to the arena, by all ranks",
    "save_seconds": "Time spent copying from the paged cache to the arena, by all ranks",
    "duplicate_blocks": "Blocks that another engine had sealed first",
    "skipped_saves": "Full blocks that were not saved, because no slot was free while their request lived",
    "failed_saves": "Blocks that could not be written or sealed",
    "match_timeouts": "Requests computed without the store because it answered too late",
    "store_losses": "Times that the connection to the store was lost",
    "handoffs_out": "Requests that ended here and were handed to another engine",
    "handoffs_in": "Requests whose prompt another engine has computed, or computes",
    "incomplete_handoffs": "Of these, requests of whose prompt not all came; the rest was computed here",
    "pulled_blocks": "Blocks that the store has pulled from another one for such requests",
    "pulled_bytes": "Bytes of these blocks",
    "handoff_wait_seconds": "Time that such requests waited for their blocks",
    "lost_blocks": "Blocks of running requests whose place on the GPU was reused: read from the arena since",
    "evicted_hits": "Blocks dropped from the GPU's prefix cache, because the store has not got them",
    "slot_waits": "Requests that waited for free slots of the arena before they could start",
    "stored_hints": "Hints sealed: which rows of a request that ended were hot",
    "used_hints": "Hints of which rows were fetched for a request that goes on from there",
    "refused_hints": "Hints that were found, but can't be read or name no row that the request has",
    "warmed_rows": "Rows that used hints named, of all layers",
    "asked_rows": "Sparse decode: rows asked for, of all layers; read every 64 steps",
    "gpu_rows": "Sparse decode: rows read from blocks that are still on the GPU",
    "hot_rows_hit": "Sparse decode: rows found in hot buffers",
    "missed_rows": "Sparse decode: rows fetched by the swap-in that asked for them",
    "peer_rows": "Sparse decode: of these, rows read from another rank's GPU instead",
    "late_rows": "Sparse decode: rows fetched from the arena because the rank that owns them was late",
    "prefetched_rows": "Sparse decode: rows fetched from the arena ahead of their swap-in",
    "prefetched_rows_used": "Sparse decode: prefetched rows that a swap-in asked for",
    "unplaced_rows": "Sparse decode: rows that found no place in a hot buffer; anything but 0 is a fault",
    "swap_in_wait_seconds": "Sparse decode: time that swap-ins waited for rows, of all requests and layers",
    "swapped_in_bytes": "Sparse decode: bytes fetched from the arena",
    "asked_pieces": "Dense models: full blocks that sparse decode picked, per layer and KV head",
    "pool_pieces": "Dense models: of these, read from vLLM's pool",
    "hot_pieces": "Dense models on a GPU: of these, found in hot buffers",
    "arena_pieces": "Dense models: of these, read from the arena",
    "arena_read_bytes": "Dense models: bytes that sparse decode read from the arena",
    "staged_blocks": "Dense models: blocks read from the arena to be attended to whole, per layer",
    "summarised_blocks": "Dense models: blocks of which summaries were made",
    "unsummarised_blocks": "Dense models on a GPU: blocks that found no room for a summary",
}

GAUGES = {
    "host_backed_requests": "Requests that hold a hot buffer",
}


@dataclass
class KVSieveStats(KVConnectorStats):
    """Counts since the last report, and gauges that have changed. `data` maps names of COUNTERS and GAUGES to
    numbers; an absent count is 0, an absent gauge as it was."""

    def __post_init__(self) -> None:
        self._told: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.data[name] = self.data.get(name, 0) + amount

    def set(self, **values: float) -> None:
        """Gauges as they are now."""
        for name, value in values.items():
            if self._told.get(name, 0) != value:
                self._told[name] = self.data[name] = value

    def take(self) -> KVSieveStats | None:
        """The counts so far, and starts again from zero; None when there is nothing to tell."""
        if self.is_empty():
            return None
        taken = KVSieveStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVSieveStats:
        self.add(**{name: value for name, value in other.data.items() if name not in GAUGES})
        self.data.update({name: value for name, value in other.data.items() if name in GAUGES})
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: counts as they are, bytes also as a rate of the copies."""
        result = {f"kvsieve_{name}": value for name, value in self.data.items() if value}
        for way in ("load", "save"):
            seconds = self.data.get(f"{way}_seconds", 0)
            if seconds:
                rate = self.data.get(f"{'loaded' if way == 'load' else 'saved'}_bytes", 0) / seconds
                result[f"kvsieve_{way}_gb_per_second"] = round(rate / 1e9, 2)
        return result

    def is_empty(self) -> bool:
        return not (any(self.data.values()) or self.data.keys() & GAUGES.keys())


class KVSievePromMetrics(KVConnectorPromMetrics):
    """`vllm:kvsieve_<name>_total`, one counter per name of COUNTERS; `vllm:kvsieve_<name>`, one gauge per
    name of GAUGES."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._per_engine: dict[str, dict[int, Any]] = {}
        for kind, names in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES)):
            for name, text in names.items():
                metric = kind(
                    name=f"vllm:kvsieve_{name}", documentation=f"{text}.", labelnames=self._labelnames
                )
                self._per_engine[name] = {
                    engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                self._per_engine[name][engine_idx].set(value)
            elif value and name in self._per_engine:
                self._per_engine[name][engine_idx].inc(value)
