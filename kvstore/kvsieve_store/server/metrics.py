"""Prometheus metrics; docs/metrics.md says what each means."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvsieve_store import __version__
from kvsieve_store.directory.directory import Directory
from kvsieve_store.peers.peers import Peers
from kvsieve_store.server.core import Core

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)


class RpcMetrics:
    """Calls of kvsieve.v1, by method. Attach counts when it starts and, if it fails, when it ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("kvsieve_rpc_requests", "Calls received.", ["method"], registry=registry)
        self._failures = Counter(
            "kvsieve_rpc_failures", "Calls that failed.", ["method", "code"], registry=registry
        )
        self._seconds = Histogram(
            "kvsieve_rpc_duration_seconds",
            "Time inside the store, per call; not for Attach.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )

    def of(self, method: str) -> tuple[Counter, Callable[[grpc.StatusCode], None], Histogram]:
        """Requests, a function that counts a failure, and the durations of one method."""

        def failed(code: grpc.StatusCode) -> None:
            self._failures.labels(method, code.name).inc()

        return self._requests.labels(method), failed, self._seconds.labels(method)


class StateCollector(Collector):
    """Reads the state machine when it is scraped, in the event loop's thread."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def describe(self) -> list[Metric]:
        """Empty: registering asks for nothing yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._store()
        yield from self._pools()
        yield from self._counters()
        if self._core.peers is not None:
            yield from self._peers(self._core.peers)
        if self._core.directory is not None:
            yield from self._directory(self._core.directory)

    def _directory(self, directory: Directory) -> Iterator[Metric]:
        counters = directory.counters
        peers = self._core.peers
        for name, help_text, value in (
            ("up", "1 while the directory can be used.", float(not directory.down)),
            ("queued_keys", "Changes that the directory has to be told of.", directory.queued),
        ):
            yield GaugeMetricFamily(f"kvsieve_directory_{name}", help_text, value=value)
        for name, help_text, value in (
            ("announced_keys", "Blocks announced, anew or again.", counters.announced),
            ("withdrawn_keys", "Blocks withdrawn.", counters.withdrawn),
            ("dropped_keys", "Changes that there was no room for.", directory.overflowed),
            ("failures", "Calls of the directory that failed.", counters.failures),
            ("stale_holders", "Stores named by the directory that had not what it said.", counters.stale),
            (
                "fetched_blocks",
                "Blocks brought from stores that the directory named.",
                peers.fetcher.blocks if peers and peers.fetcher else 0,
            ),
        ):
            yield CounterMetricFamily(f"kvsieve_directory_{name}", help_text, value=value)
        lookups = CounterMetricFamily(
            "kvsieve_directory_lookups", "Chains looked for, by what came of it.", labels=["outcome"]
        )
        for outcome in ("found", "missing", "failed"):
            lookups.add_metric([outcome], getattr(counters, outcome))
        yield lookups

    def _peers(self, peers: Peers) -> Iterator[Metric]:
        for name, help_text, value in (
            ("kvsieve_peer_offers", "Offers that other stores may read now.", len(peers.offers)),
            (
                "kvsieve_peer_waiting_offers",
                "Offers that wait for blocks to be sealed.",
                len(peers.offers.waits),
            ),
            (
                "kvsieve_peer_holds",
                "Hand-offs whose blocks are kept until they are pulled.",
                len(peers.holds),
            ),
            ("kvsieve_peer_connections", "Connections of other stores.", peers.plane.links),
            ("kvsieve_peer_pulls", "Pulls under way.", peers.puller.pulls),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)
        for name, help_text, value in (
            ("kvsieve_peer_offered_blocks", "Blocks offered to other stores.", peers.offers.blocks),
            (
                "kvsieve_peer_taken_holds",
                "Hand-offs that ended because all was pulled.",
                peers.holds.taken_holds,
            ),
            ("kvsieve_peer_expired_holds", "Hand-offs that ended by time.", peers.holds.expired),
            (
                "kvsieve_peer_pull_waits",
                "Times that pulls waited for blocks in vain, and asked again.",
                peers.puller.waits,
            ),
        ):
            yield CounterMetricFamily(name, help_text, value=value)
        read = CounterMetricFamily(
            "kvsieve_peer_read_bytes", "Bytes read from other stores.", labels=["peer", "transport"]
        )
        seconds = CounterMetricFamily(
            "kvsieve_peer_read_seconds", "Time that reads took.", labels=["peer", "transport"]
        )
        early, pulled, damaged, failures = (
            CounterMetricFamily(f"kvsieve_peer_{name}", help_text, labels=["peer"])
            for name, help_text in (
                ("early_bytes", "Of the bytes read, those of blocks that were still being written."),
                ("pulled_blocks", "Blocks pulled from other stores."),
                ("damaged_blocks", "Blocks that came with another digest, and were not taken."),
                ("link_failures", "Links to other stores that broke or were not to be had in time."),
            )
        )
        for peer, counters in peers.links.counters().items():
            for transport, count in counters.bytes.items():
                read.add_metric([peer, transport], count)
                seconds.add_metric([peer, transport], counters.seconds[transport])
            early.add_metric([peer], counters.early)
            pulled.add_metric([peer], counters.pulled)
            damaged.add_metric([peer], counters.damaged)
            failures.add_metric([peer], counters.failures)
        yield from (read, seconds, early, pulled, damaged, failures)

    def _store(self) -> Iterator[Metric]:
        core, totals = self._core, self._core.state.totals()
        info = GaugeMetricFamily("kvsieve_build_info", "1; the labels say which store.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        for name, help_text, value in (
            ("kvsieve_ready", "1 when engines can attach.", float(core.why_not_ready() is None)),
            ("kvsieve_prefaulted_ratio", "Share of the arena that is prefaulted.", core.prefaulted),
            ("kvsieve_arena_bytes", "Size of the arena.", totals.arena_bytes),
            ("kvsieve_arena_owned_bytes", "Bytes that pools own.", totals.owned_bytes),
            ("kvsieve_arena_sealed_bytes", "Bytes in sealed blocks.", totals.sealed_bytes),
            ("kvsieve_sessions", "Engines attached.", totals.sessions),
            (
                "kvsieve_fencing_sessions",
                "Ended sessions whose lock file a process still holds.",
                totals.fencing_sessions,
            ),
            ("kvsieve_leases", "Leases held.", totals.leases),
            (
                "kvsieve_held_blocks",
                "Announced blocks that stay until another store has them.",
                totals.held_blocks,
            ),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)

    def _pools(self) -> Iterator[Metric]:
        def gauge(name: str, help_text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, help_text, labels=["pool"])

        owned = gauge("kvsieve_pool_owned_bytes", "Bytes of the extents that the pool owns.")
        quota = gauge("kvsieve_pool_quota_bytes", "Most bytes that the pool may own.")
        sealed = gauge("kvsieve_pool_sealed_bytes", "Bytes in the pool's sealed blocks.")
        sessions = gauge("kvsieve_pool_sessions", "Engines attached to the pool.")
        blocks = GaugeMetricFamily(
            "kvsieve_pool_blocks",
            "Slots free, writing or sealed; leased and pinned are among the sealed.",
            labels=["pool", "state"],
        )
        for row in self._core.state.list_pools():
            pool = [row.name]
            owned.add_metric(pool, row.owned_bytes)
            quota.add_metric(pool, row.quota_bytes)
            sealed.add_metric(pool, row.sealed_blocks * row.slot_bytes)
            sessions.add_metric(pool, row.sessions)
            for state, number in (
                ("free", row.free_slots),
                ("writing", row.writing_slots),
                ("sealed", row.sealed_blocks),
                ("leased", row.leased_blocks),
                ("pinned", row.pinned_blocks),
            ):
                blocks.add_metric([row.name, state], number)
        yield from (owned, quota, sealed, sessions, blocks)

    def _counters(self) -> Iterator[Metric]:
        families = {
            field: CounterMetricFamily(f"kvsieve_{field}", help_text, labels=["pool"])
            for field, help_text in _COUNTERS.items()
        }
        for pool, counters in self._core.state.counters().items():
            for field, family in families.items():
                family.add_metric([pool], getattr(counters, field))
        yield from families.values()


_COUNTERS = {
    "matched_blocks": "Keys that matches found.",
    "missed_blocks": "Keys asked beyond what matched.",
    "sealed_blocks": "Blocks sealed.",
    "duplicate_blocks": "Blocks sealed that were there already.",
    "evicted_blocks": "Blocks dropped to make room or by an operator's evict.",
    "cleared_blocks": "Blocks dropped by an operator's clear.",
    "granted_slots": "Slots granted.",
    "denied_slots": "Slots asked for that could not be granted.",
    "expired_leases": "Leases that ran out before they were given back.",
}
"""Fields of state.Counters."""


def registry_of(core: Core) -> CollectorRegistry:
    """A registry with everything but the RPC metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(core))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
