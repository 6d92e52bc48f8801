"""The proxy's metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """role: prefill or decode. instance: an engine's URL."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvsieve_proxy_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvsieve_proxy_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"kvsieve_proxy_{name}", text, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Requests that ended, by flow and outcome.", "flow", "outcome")
        self.under_way = gauge("requests_under_way", "Requests under way.")
        self.seconds = histogram("request_seconds", "From a request to the end of its answer.")
        self.first_byte = histogram("first_byte_seconds", "From a request to the first byte of its answer.")
        self.prefill_seconds = histogram("prefill_seconds", "Time of prefill requests that succeeded.")
        self.up = gauge("instance_up", "Whether an engine gets requests.", "role", "instance")
        self.outstanding = gauge("instance_requests", "Requests under way on an engine.", "role", "instance")
        self.failures = counter("instance_failures", "Requests that an engine failed.", "role", "instance")
        self.ejections = counter(
            "instance_ejections", "Times that an engine was taken out.", "role", "instance"
        )
        self.retries = counter("retries", "Requests that went to another engine.", "role")
        self.without_prefill = counter(
            "without_prefill", "Answers whose prefill failed; decode computed all."
        )
