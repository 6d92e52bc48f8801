"""What the scheduler half remembers: of each request, and of each block and load on its way."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockStored

from kvsieve_store.client import Match, SlotRef

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvsieve_connector.sparse.hosts import Host


@dataclass(slots=True)
class RequestState:
    """known: blocks of the request's prefix that the store has, or is about to have.
    match: sent and not used yet; match_until: when it is not waited for any longer, on the monotonic clock.
    instance: the store that answered the match.
    asked_after: preemptions of the request when its last match was sent: one match per admission.
    lookups: False once a load has failed; the request is computed from then on.
    saves: False once a block can't be saved any more; what follows could not be found without it.
    fetched: what was fetched for the match in hand is counted.
    asked_again: sparse mode: the match in hand was asked because the one before fell short.
    departs: it goes on at another engine once its prompt is computed. tail_saved: its
    tail (blocks.py) is stored, too.
    arrives: its prompt was computed by another engine.
    """

    request: Request
    known: int = 0
    match: Future[Match] | None = None
    match_until: float = 0.0
    instance: bytes = b""
    asked_after: int = -1
    lookups: bool = True
    saves: bool = True
    fetched: bool = False
    asked_again: bool = False
    departs: bool = False
    tail_saved: bool = False
    arrives: bool = False


@dataclass(slots=True)
class SaveJob:
    """A block on its way to the store. written, failed: ranks that are done with it, and those that failed.

    event: what to tell vLLM's KV events once it is sealed.
    host, index: sparse mode: whose block it is, and which; None for a hint (sparse/hints.py).
    """

    key: bytes
    parent: bytes
    ref: SlotRef
    event: BlockStored | None
    host: Host | None = None
    index: int = 0
    written: int = 0
    failed: int = 0


@dataclass(eq=False, slots=True)
class Sealing:
    """Blocks whose seal has been sent. future: of one SealResult per job; in sparse mode of a Held."""

    jobs: list[SaveJob]
    future: Future[Any]


@dataclass(slots=True)
class Load:
    """Leases of a load under way, and the epoch that they belong to."""

    lease_ids: tuple[int, ...]
    epoch: int
