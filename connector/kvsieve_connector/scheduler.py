"""The scheduler's half: matches prefixes, orders loads and saves, seals what the workers have written.

One request's life here: `on_new_request` sends its match; `matched_tokens` answers None until the reply is
there; `allocated` turns the match into a load order; each step `build_orders` finds the blocks that the step
completes and spends a credit on each; `take_report` seals them once every rank has written its part.
Nothing waits for the store: futures are polled, releases and seals leave in one batch a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvsieve_connector.geometry import group_block_tokens, store_block_tokens
from kvsieve_connector.metadata import BlockPages, LoadOrder, SaveOrder, StepOrders, WorkerReport
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.stats import KVSieveStats
from kvsieve_store.client import Attachment, Match, SealEntry, SealResult, SlotRef, StoreClient

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvsieve")

MEDIUM = "CPU"
"""Medium of our KV events: the host's memory."""


@dataclass(slots=True)
class _RequestState:
    request: Request
    known: int = 0
    """Blocks of the request's prefix that the store has, or is about to have."""
    match: Future[Match] | None = None
    match_epoch: int = 0
    match_started: float = 0.0
    asked_after: int = -1
    """Preemptions of the request when its last match was sent: one match per admission."""
    lookups: bool = True
    """False once a load has failed: the request is computed from then on."""


@dataclass(slots=True)
class _SaveJob:
    """A block on its way to the store."""

    req_id: str
    index: int
    key: bytes
    parent: bytes
    ref: SlotRef
    ranks: int = 0


@dataclass(slots=True)
class _Sealing:
    jobs: list[_SaveJob]
    future: Future[list[SealResult]]


@dataclass(slots=True)
class _Load:
    lease_ids: tuple[int, ...]
    epoch: int
    blocks: int


class SchedulerHalf:
    """See the module's docstring. `client` is started by the caller; None until the handshake."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        self.settings = settings
        self.stats = KVSieveStats()
        self.block_tokens = store_block_tokens(kv_cache_config)
        self._group_tokens = group_block_tokens(kv_cache_config)
        hash_tokens = kv_cache_config.hash_block_size or self.block_tokens
        if self.block_tokens % hash_tokens:
            raise ValueError(
                f"kvsieve: hash block size {hash_tokens} does not divide the block size {self.block_tokens}"
            )
        self._hashes_per_block = self.block_tokens // hash_tokens
        self._writers = 1
        self._max_running = vllm_config.scheduler_config.max_num_seqs
        events = vllm_config.kv_events_config
        self._events: list[KVCacheEvent] | None = [] if events and events.enable_kv_cache_events else None

        self._client: StoreClient | None = None
        self._sent_epoch = 0
        self._requests: dict[str, _RequestState] = {}
        self._new_loads: list[LoadOrder] = []
        self._loads: dict[str, _Load] = {}
        self._jobs: dict[int, _SaveJob] = {}
        self._next_job = 1
        self._in_flight: set[bytes] = set()
        """Keys being written or sealed."""
        self._sealing: list[_Sealing] = []
        self._leases_back: list[int] = []
        self._slots_back: list[SlotRef] = []

    def use(self, client: StoreClient, writers: int) -> None:
        """Starts to work with a store. writers: ranks that write a part of each block."""
        self._client, self._writers = client, writers

    # Matching and loading

    def on_new_request(self, request: Request) -> None:
        state = self._requests[request.request_id] = _RequestState(request)
        # A request that will queue for long is matched when its turn comes: its lease would only wait.
        if len(self._requests) <= self._max_running:
            self._start_match(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a load can add to `local_tokens`; None while the store has not answered."""
        state = self._requests.get(request.request_id)
        if state is None:  # it came before the connector did
            state = self._requests[request.request_id] = _RequestState(request)
        if state.match is None and not self._start_match(state):
            return 0, False
        assert state.match is not None
        if not state.match.done():
            if time.monotonic() - state.match_started < self.settings.match_timeout_ms / 1000:
                return None, False
            self.stats.add(match_timeouts=1)
            self._drop_match(state)
            return 0, False
        match = self._match_result(state)
        if match is None:
            return 0, False
        tokens = len(match.refs) * self.block_tokens - local_tokens
        if tokens <= 0 or local_tokens % self.block_tokens:
            self._drop_match(state)
            return 0, False
        return tokens, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The scheduler has given blocks to the request; those of `external_tokens` are ours to fill."""
        state = self._requests[request.request_id]
        match = self._match_result(state) if external_tokens else None
        if match is None:
            return
        last = len(match.refs)
        first = last - external_tokens // self.block_tokens
        pages = self._pages(blocks.get_block_ids(), range(first, last))
        attachment = self._attachment()
        assert attachment is not None
        self._new_loads.append(
            LoadOrder(request.request_id, attachment.instance, tuple(match.refs[first:last]), tuple(pages))
        )
        self._loads[request.request_id] = _Load(match.lease_ids, state.match_epoch, last - first)
        state.match = None
        self.stats.add(matched_blocks=last - first)

    def loads_ended(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """The workers have carried out load orders, well or badly."""
        for req_id in failed:
            if req_id in self._requests:
                self._requests[req_id].lookups = False
        for req_id in done:
            load = self._loads.pop(req_id, None)
            if load is not None and load.epoch == self._epoch():
                self._leases_back.extend(load.lease_ids)

    def _start_match(self, state: _RequestState) -> bool:
        """False when there is nothing to ask, or nobody."""
        request = state.request
        # The last token is always computed: its output is what the step is for.
        count = min(self._keys_known(request), (request.num_tokens - 1) // self.block_tokens)
        attachment = self._attachment()
        if attachment is None or not state.lookups or count == 0 or request.skip_reading_prefix_cache:
            return False
        if state.asked_after == request.num_preemptions:
            return False
        assert self._client is not None
        state.asked_after = request.num_preemptions
        state.match = self._client.match_async([self._key(request, i) for i in range(count)])
        state.match_epoch = attachment.epoch
        state.match_started = time.monotonic()
        self.stats.add(asked_blocks=count)
        return True

    def _match_result(self, state: _RequestState) -> Match | None:
        """The answer to a finished match, unless the call failed or its session is gone."""
        if state.match is None or not state.match.done():
            return None
        if state.match.cancelled() or state.match.exception() or state.match_epoch != self._epoch():
            state.match = None
            return None
        match = state.match.result()
        state.known = max(state.known, len(match.refs))
        return match

    def _drop_match(self, state: _RequestState) -> None:
        """Gives the lease back, now or when the answer comes."""
        future, epoch, state.match = state.match, state.match_epoch, None
        if future is None or future.cancel() or self._client is None:
            return
        client = self._client

        def give_back(answered: Future[Match]) -> None:
            if not answered.cancelled() and not answered.exception() and epoch == self._epoch():
                client.release_async(answered.result().lease_ids, epoch=epoch)

        future.add_done_callback(give_back)

    # Saving

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        orders = StepOrders(loads=self._new_loads)
        self._new_loads = []
        attachment = self._attachment()
        if self._sent_epoch and self._epoch() != self._sent_epoch:
            self.stats.add(store_losses=1)
            self._sent_epoch = 0
            self._forget_session()
        if attachment is not None and not self._sent_epoch:
            self._sent_epoch = attachment.epoch
            orders.attachment = attachment
        if self._sent_epoch:
            block_state = output.kv_connector_block_state
            resolve = block_state.resolve_block_ids if block_state else None
            for req_id, tokens in output.num_scheduled_tokens.items():
                state = self._requests.get(req_id)
                if state is not None and resolve is not None:
                    self._save_full_blocks(state, tokens, resolve, orders)
        self._poll_seals()
        self._give_back()
        return orders

    def take_report(self, report: WorkerReport | None) -> None:
        """Seals the blocks that are now written by every rank: one batch."""
        ready: list[_SaveJob] = []
        if report is not None:
            for number in report.failed:
                if (job := self._jobs.pop(number, None)) is not None:
                    self._in_flight.discard(job.key)
                    self._slots_back.append(job.ref)
                    self.stats.add(failed_saves=1)
            for number, ranks in report.saved.items():
                job = self._jobs.get(number)
                if job is not None:
                    job.ranks += ranks
                    if job.ranks >= self._writers:
                        ready.append(self._jobs.pop(number))
        if ready and self._client is not None:
            entries = [SealEntry(job.key, job.parent, job.ref) for job in ready]
            future = self._client.seal_async(entries, epoch=self._sent_epoch)
            self._sealing.append(_Sealing(ready, future))
        self._poll_seals()
        self._give_back()

    def has_pending_work(self) -> bool:
        """Whether written blocks wait for a step to be reported in."""
        return bool(self._jobs)

    def finished(self, request: Request) -> None:
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._drop_match(state)
        if self._sent_epoch and (skipped := self._full_blocks(state, 0) - state.known) > 0:
            self.stats.add(skipped_saves=skipped)

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    def _save_full_blocks(
        self,
        state: _RequestState,
        tokens: int,
        resolve: Callable[[str], tuple[list[int], ...]],
        orders: StepOrders,
    ) -> None:
        """Orders a save of each block that is full after this step and not known to the store."""
        request, full = state.request, self._full_blocks(state, tokens)
        if full <= state.known:
            return
        assert self._client is not None
        wanted = []
        for index in range(state.known, full):
            key = self._key(request, index)
            if key not in self._in_flight:
                wanted.append((index, key))
        refs = self._client.take_credits(len(wanted), epoch=self._sent_epoch) if wanted else []
        if len(refs) < len(wanted):  # no free slot now: tried again at the request's next step
            full = wanted[len(refs)][0]
        state.known = full
        if not refs:
            return
        pages = self._pages(resolve(request.request_id), [index for index, _ in wanted[: len(refs)]])
        for (index, key), ref, block in zip(wanted, refs, pages, strict=False):
            if not all(all(group) for group in block):
                # A sliding window has passed this block already: it can't be saved whole any more.
                self._slots_back.append(ref)
                continue
            parent = self._key(request, index - 1) if index else b""
            self._jobs[self._next_job] = _SaveJob(request.request_id, index, key, parent, ref)
            orders.saves.append(SaveOrder(self._next_job, ref.slot, block))
            self._next_job += 1
            self._in_flight.add(key)

    def _poll_seals(self) -> None:
        waiting = []
        for sealing in self._sealing:
            if sealing.future.done():
                self._sealed(sealing)
            else:
                waiting.append(sealing)
        self._sealing = waiting

    def _sealed(self, sealing: _Sealing) -> None:
        self._in_flight.difference_update(job.key for job in sealing.jobs)
        if sealing.future.cancelled() or sealing.future.exception():
            self.stats.add(failed_saves=len(sealing.jobs))
            return
        for job, result in zip(sealing.jobs, sealing.future.result(), strict=True):
            if result is SealResult.DUPLICATE:
                self.stats.add(duplicate_blocks=1)
            else:
                self.stats.add(saved_blocks=1)
                self._stored_event(job)

    def _stored_event(self, job: _SaveJob) -> None:
        state = self._requests.get(job.req_id)
        if self._events is None or state is None:
            return
        request, first = state.request, job.index * self.block_tokens
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(BlockHash(job.key))],
                parent_block_hash=maybe_convert_block_hash(BlockHash(job.parent)) if job.parent else None,
                token_ids=list(request.all_token_ids[first : first + self.block_tokens]),
                block_size=self.block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM,
                lora_name=lora.name if lora else None,
            )
        )

    def _full_blocks(self, state: _RequestState, tokens: int) -> int:
        """Blocks of the request that are full, and may be saved, once `tokens` more are computed."""
        request = state.request
        computed = request.num_computed_tokens + tokens
        if not self.settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        # Keys exist for confirmed tokens only, so rejected draft tokens are never saved.
        return min(computed // self.block_tokens, self._keys_known(request))

    # The session

    def _attachment(self) -> Attachment | None:
        return self._client.attachment if self._client is not None else None

    def _epoch(self) -> int:
        attachment = self._attachment()
        return attachment.epoch if attachment is not None else 0

    def _forget_session(self) -> None:
        """A new session: slots, leases and jobs of the one before mean nothing any more."""
        self._jobs.clear()
        self._in_flight.clear()
        self._leases_back.clear()
        self._slots_back.clear()
        for state in self._requests.values():
            state.known = 0

    def _give_back(self) -> None:
        """Returns leases and unused slots: one call a step, none when there is nothing."""
        if (self._leases_back or self._slots_back) and self._attachment() is not None:
            assert self._client is not None
            self._client.release_async(self._leases_back, self._slots_back, epoch=self._sent_epoch)
            self._leases_back, self._slots_back = [], []

    # Keys and pages

    def _keys_known(self, request: Request) -> int:
        return len(request.block_hashes) // self._hashes_per_block

    def _key(self, request: Request, index: int) -> bytes:
        """Key of a request's block: its last hash, which chains over all before it."""
        return bytes(request.block_hashes[(index + 1) * self._hashes_per_block - 1])

    def _pages(self, block_ids: tuple[list[int], ...], indices: Iterable[int]) -> list[BlockPages]:
        per_block = [self.block_tokens // tokens for tokens in self._group_tokens]
        return [
            tuple(
                tuple(ids[index * n : (index + 1) * n]) for ids, n in zip(block_ids, per_block, strict=True)
            )
            for index in indices
        ]
