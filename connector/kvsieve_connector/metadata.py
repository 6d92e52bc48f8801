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


@dataclass(frozen=True, slots=True)
class HostBacked:
    """Sparse mode: a request gets its hot buffer. hot_blocks: ids of its blocks, per main group in order."""

    req_id: str
    hot_blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """Sparse mode: blocks of a host-backed request that are read from the arena from now on.

    epoch: of the attachment that the slots belong to. blocks: (index of the block in the request, slot).
    """

    req_id: str
    epoch: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class HostFilled:
    """Sparse mode of dense models on GPUs: blocks of a host-backed request have filled, from index `first`
    on, in these blocks of vLLM's pool, which keep them until the next forward."""

    req_id: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostRow:
    """Sparse mode of dense models: a host-backed request is in the step's batch.

    block: id of the one that its newest token is written to, which no other request has. decodes: it computes
    one token, of its answer.
    """

    block: int
    req_id: str
    decodes: bool


@dataclass(frozen=True, slots=True)
class HintSave:
    """Sparse mode: write to a slot which rows of a request are hot, before its tables go. job: as in
    SaveOrder."""

    job: int
    slot: int
    req_id: str


@dataclass(frozen=True, slots=True)
class HintLoad:
    """Sparse mode: fetch the rows of a host-backed request that a leased slot names.

    epoch: of the attachment that the slot belongs to. tokens: positions below this count are meant.
    """

    req_id: str
    epoch: int
    ref: SlotRef
    tokens: int


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler -> workers. `attachment` comes when it has changed; orders refer to it from this step on.

    detach: the session is over, and there is no other yet; its arena is copied from and to no more.
    hint_saves, host_ended, host_backed, host_filled, host_blocks, hint_loads: sparse mode, applied in this
    order. A request that is named in host_ended has no hot buffer any more; one that starts anew in the same
    step is named in both.
    forget_epochs: sparse mode: attachments of the past that no request reads any more.
    host_rows: sparse mode of dense models on CPUs: host-backed requests of the step's batch.
    """

    attachment: Attachment | None = None
    detach: bool = False
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    hint_saves: list[HintSave] = field(default_factory=list)
    host_ended: list[str] = field(default_factory=list)
    host_backed: list[HostBacked] = field(default_factory=list)
    host_filled: list[HostFilled] = field(default_factory=list)
    host_blocks: list[HostBlocks] = field(default_factory=list)
    hint_loads: list[HintLoad] = field(default_factory=list)
    forget_epochs: list[int] = field(default_factory=list)
    host_rows: list[HostRow] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers -> scheduler, summed over ranks.

    saved, failed: per save job, how many ranks are done with it, well or badly. Every rank reports every
    job, also one that writes no part of it.
    unready: per epoch of the attachment, how many ranks can't reach the arena: +1 when a rank finds out, -1
    when it can.
    """

    saved: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    unready: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        for name in ("saved", "failed", "unready"):
            mine = getattr(self, name)
            for key, ranks in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + ranks
        return self


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker knows once its cache is allocated."""

    geometry: WorkerGeometry
