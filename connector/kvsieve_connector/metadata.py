"""What the two halves tell each other, once a step: orders to the workers, reports back.

Plain data: vLLM pickles it between its own processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsieve_connector.geometry import WorkerGeometry
from kvsieve_store.client import Attachment, SlotRef

BlockPages = tuple[tuple[int, ...], ...]
"""vLLM block ids that make up one block of the store: per KV group, in token order; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy one block from the paged cache to a slot. `job` is unique in the engine's life."""

    job: int
    slot: int
    pages: BlockPages


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy blocks from leased slots into the paged cache, for a request that waits for them."""

    req_id: str
    instance: bytes
    refs: tuple[SlotRef, ...]
    pages: tuple[BlockPages, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler -> workers. `attachment` comes when it has changed; orders refer to it from this step on."""

    attachment: Attachment | None = None
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers -> scheduler. Per save job, how many ranks have written their part; and jobs that failed."""

    saved: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        for job, ranks in other.saved.items():
            self.saved[job] = self.saved.get(job, 0) + ranks
        self.failed |= other.failed
        return self


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker knows once its cache is allocated."""

    geometry: WorkerGeometry
