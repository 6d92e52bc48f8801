"""The scheduler's half: matches prefixes, orders loads and saves, seals what the workers have written.

One request's life here: `on_new_request` sends its match; `matched_tokens` answers None until the reply is
there; `allocated` turns the match into a load order; each step `build_orders` finds the blocks that the step
completes and spends a credit on each; `take_report` seals them once every rank is done with them.
Nothing waits for the store: futures are polled, releases and seals leave in batches.

The client's thread may lose or replace the session at any moment. So the attachment is read once per call,
and what was promised to vLLM (a load) is ordered in any case: the workers refuse what is stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import RequestStatus

from kvsieve_connector.blocks import Blocks
from kvsieve_connector.handoff import (
    Arrivals,
    Departures,
    Part,
    Source,
    departure_params,
    is_departure,
    parts_of,
)
from kvsieve_connector.metadata import BlockPages, LoadOrder, SaveOrder, StepOrders, WorkerReport
from kvsieve_connector.requests import Load, RequestState, SaveJob, Sealing
from kvsieve_connector.saves import Saves
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.stats import KVSieveStats
from kvsieve_store.client import Attachment, Fetch, Match, SealEntry, SealResult, SlotRef, StoreClient
from kvsieve_store.errors import UnavailableError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvsieve")

ResolveBlockIds = Callable[[str], tuple[list[int], ...]]


class SchedulerHalf:
    """See the module's docstring. Works without a store until `use` is called."""

    _takes_tails = True
    """Whether a request can begin with a block that is not full."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        self.settings = settings
        self.stats = KVSieveStats()
        hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self.blocks = Blocks(kv_cache_config, hash_fn)
        self.block_tokens = self.blocks.tokens
        self._max_running = vllm_config.scheduler_config.max_num_seqs
        events = vllm_config.kv_events_config
        self._with_events = bool(events and events.enable_kv_cache_events)
        self._events: list[KVCacheEvent] = []

        self._client: StoreClient | None = None
        self._sent_epoch = 0
        """Epoch of the attachment that the workers were given last; 0: none."""
        self._unready = 0
        """Ranks that can't reach the arena of that attachment."""
        self._requests: dict[str, RequestState] = {}
        self._new_loads: list[LoadOrder] = []
        self._loads: dict[str, Load] = {}
        self._saves = Saves(vllm_config.parallel_config.tensor_parallel_size)
        self._arrivals = Arrivals(settings, self.stats)
        self._departures = Departures(settings.handoff_lease_ms / 1000)
        self._credit_target = 0
        self._leases_back: list[int] = []
        self._slots_back: list[SlotRef] = []
        self._announced: list[SaveJob] = []
        """Ordered in this step, of requests that go on elsewhere."""

    def use(self, client: StoreClient | None, credit_target: int = 0) -> None:
        """Works with this client from now on, started by the caller; None: with no store any more.

        credit_target: slots that the client keeps granted ahead.
        """
        self._client, self._credit_target = client, credit_target

    @property
    def attention(self) -> str:
        """How attention is approximated; empty: it is exact. Engines that differ in it share no pool."""
        return ""

    def check_attachment(self, attachment: Attachment) -> None:
        """Raises ValueError, which says what to change, when the store has too little for this engine."""

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Once, before the first request."""

    # Matching and loading

    def on_new_request(self, request: Request) -> None:
        state = self._requests[request.request_id] = RequestState(request)
        state.departs = is_departure(request)
        if (source := Source.of(request)) is not None:
            state.arrives = True
            attachment = None if self._unready else self._attachment()
            self._arrivals.begin(request.request_id, source, self._parts(request), attachment)
            self._arrivals.poll(self._client)
            return
        # A request that will queue for long is matched when its turn comes: its lease would only wait.
        if len(self._requests) <= self._max_running:
            self._start_match(state)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a load can add to `local_tokens`; None while the store has not answered."""
        state = self._requests.setdefault(request.request_id, RequestState(request))
        if not self._has_arrived(request, local_tokens):
            return None, False
        if state.match is None and not self._start_match(state):
            return 0, False
        assert state.match is not None
        if not state.match.done():
            if not self._is_late(state):
                return None, False
            self.stats.add(match_timeouts=1)
            self._drop_match(state)
            return 0, False
        match = self._match_result(state)
        if match is None:
            return 0, False
        tokens = self._tokens_of(match, request) - local_tokens
        if tokens <= 0 or local_tokens % self.block_tokens:
            self._drop_match(state)
            return 0, False
        return tokens, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The scheduler has given blocks to the request; those of `external_tokens` are ours to fill.

        vLLM waits for the load from now on, so it is ordered even if the session has just been lost.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.match is None:
            return
        if external_tokens == 0:
            self._drop_match(state)
            return
        match = state.match.result()
        last = len(match.refs)
        first = (self._tokens_of(match, request) - external_tokens) // self.block_tokens
        pages = self.blocks.pages(blocks.get_block_ids(), range(first, last))
        refs = tuple(match.refs[first:last])
        self._new_loads.append(LoadOrder(request.request_id, state.instance, refs, tuple(pages)))
        self._loads[request.request_id] = Load(match.lease_ids, match.epoch)
        state.match = None
        self.stats.add(matched_blocks=last - first)

    def loads_ended(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """The workers have carried out load orders, well or badly."""
        for req_id in failed:
            if req_id in self._requests:
                self._requests[req_id].lookups = False
        for req_id in done:
            load = self._loads.pop(req_id, None)
            if load is not None and load.epoch == self._sent_epoch:
                self._leases_back.extend(load.lease_ids)

    def _start_match(self, state: RequestState) -> bool:
        """False when there is nothing to ask, or nobody."""
        request, attachment = state.request, self._attachment()
        if attachment is None or self._unready:
            return False
        if not state.lookups or request.skip_reading_prefix_cache:
            return False
        if state.asked_after == request.num_preemptions:
            return False
        keys = self._wanted_keys(state)
        if not keys:
            return False
        assert self._client is not None
        state.asked_after = request.num_preemptions
        fetch_ms = self.settings.fetch_timeout_ms if attachment.directory else 0
        fetch = Fetch(fetch_ms / 1000, self.settings.fetch_min_blocks) if fetch_ms else None
        state.match = self._client.match_async(keys, fetch=fetch)
        state.fetched = False
        state.match_until = time.monotonic() + (self.settings.match_timeout_ms + fetch_ms) / 1000
        self.stats.add(asked_blocks=len(keys))
        return True

    def _is_late(self, state: RequestState) -> bool:
        """Whether the answer to the request's match is not waited for any longer."""
        return time.monotonic() >= state.match_until

    def _wanted_keys(self, state: RequestState) -> list[bytes]:
        """Blocks that the request could begin with. Of one that was handed over, all of the prompt."""
        request = state.request
        if state.arrives and self._takes_tails and request.num_tokens == request.num_prompt_tokens:
            return self._prompt_keys(request)
        # The last token is always computed: its output is what the step is for.
        return self.blocks.first(request, (request.num_tokens - 1) // self.block_tokens)

    def _tokens_of(self, match: Match, request: Request) -> int:
        """Tokens that the request can begin with; the last one is always computed."""
        return min(len(match.refs) * self.block_tokens, request.num_tokens - 1)

    def _match_result(self, state: RequestState) -> Match | None:
        """The answer to a finished match, unless the call failed or its session is gone."""
        assert state.match is not None
        if state.match.cancelled() or state.match.exception():
            state.match = None
            return None
        match, attachment = state.match.result(), self._attachment()
        if attachment is None or match.epoch != attachment.epoch:
            state.match = None
            return None
        state.instance = attachment.instance
        state.known = max(state.known, min(len(match.refs), self.blocks.known(state.request)))
        if match.fetched and not state.fetched:
            state.fetched = True
            self.stats.add(fetched_blocks=match.fetched)
        return match

    def _drop_match(self, state: RequestState) -> None:
        """Gives the lease back, now or when the answer comes."""
        future, state.match = state.match, None
        client = self._client
        if future is None or client is None or future.cancel():  # the client releases what nobody reads
            return

        def give_back(answered: Future[Match]) -> None:
            if not answered.cancelled() and not answered.exception():
                match = answered.result()
                if match.lease_ids:
                    client.release_async(match.lease_ids, epoch=match.epoch)

        future.add_done_callback(give_back)

    # Saving

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        orders = StepOrders(loads=self._new_loads)
        self._new_loads = []
        attachment = self._attachment()
        epoch = attachment.epoch if attachment is not None else 0
        if self._sent_epoch and epoch != self._sent_epoch:
            self.stats.add(store_losses=1)
            self._forget_session()
            orders.detach = attachment is None
        if attachment is not None and not self._sent_epoch:
            self._sent_epoch = epoch
            orders.attachment = attachment
        block_state = output.kv_connector_block_state
        if self._sent_epoch and not self._unready and block_state is not None:
            for req_id, tokens in output.num_scheduled_tokens.items():
                state = self._requests.get(req_id)
                if state is not None and state.saves:
                    first = len(orders.saves)
                    self._save_full_blocks(state, tokens, block_state.resolve_block_ids, orders)
                    if state.departs and not state.tail_saved:
                        self._save_tail(state, tokens, block_state.resolve_block_ids, orders)
                    if state.departs:
                        self._announced += [self._saves[order.job] for order in orders.saves[first:]]
        self._announce()
        self._poll_seals()
        self._arrivals.poll(self._client)
        self._departures.poll(self._client, self._saves)
        self._give_back()
        return orders

    def take_report(self, report: WorkerReport | None) -> None:
        """Seals the blocks that every rank has written: one batch."""
        self._poll_seals()
        if report is not None:
            self._unready += report.unready.get(self._sent_epoch, 0)
            ready, failed = self._saves.reported(report)
            for job in failed:
                self._abandon(job)
            if ready and self._client is not None:
                self._seal(ready, self._client)
        self._departures.poll(self._client, self._saves)
        self._give_back()

    def _announce(self) -> None:
        """Lets the store of who goes on with a request read its blocks while they are written. Nothing is
        lost without."""
        jobs, self._announced = self._announced, []
        attachment = self._attachment()
        if jobs and attachment is not None and attachment.peer_address and self._client is not None:
            entries = [SealEntry(job.key, job.parent, job.ref) for job in jobs]
            seconds = self._departures.lease_seconds
            self._client.announce_async(entries, epoch=self._sent_epoch, hold_seconds=seconds)

    def _seal(self, ready: list[SaveJob], client: StoreClient) -> None:
        entries = [SealEntry(job.key, job.parent, job.ref) for job in ready]
        self._saves.sent(Sealing(ready, client.seal_async(entries, epoch=self._sent_epoch)))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of running requests are about to come free."""
        return False

    def has_pending_work(self) -> bool:
        """Whether the engine should step on although no request runs: reports or answers are due."""
        return bool(self._saves or self._departures)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """`kv_transfer_params` for the answer of a request that goes on elsewhere."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        self._arrivals.end(request.request_id)
        self._drop_match(state)
        self._count_skipped(state)
        return self._depart(state) if state.departs else None

    def _count_skipped(self, state: RequestState) -> None:
        if self._sent_epoch and (skipped := self._full_blocks(state, 0) - state.known) > 0:
            self.stats.add(skipped_saves=skipped)

    # Hand-offs

    def _has_arrived(self, request: Request, local_tokens: int) -> bool:
        """Whether a request can be matched. One whose prompt the GPU has needs nothing from elsewhere."""
        if local_tokens and local_tokens + self.block_tokens >= request.num_tokens:
            self._arrivals.end(request.request_id)
        return self._arrivals.is_over(request.request_id, self._client)

    def _parts(self, request: Request) -> list[Part]:
        """What to pull for a request."""
        return parts_of(self._prompt_keys(request))

    def _prompt_keys(self, request: Request) -> list[bytes]:
        """Keys of the prompt's full blocks and, where it can be used, of its tail."""
        keys = self.blocks.first(request, self.blocks.full(request))
        tail = self.blocks.tail_key(request) if self._takes_tails else b""
        return [*keys, tail] if tail else keys

    def _save_tail(
        self, state: RequestState, tokens: int, resolve: ResolveBlockIds, orders: StepOrders
    ) -> None:
        """Orders a save of the prompt's tail, in the step that computes its end."""
        request = state.request
        if not self._takes_tails or request.num_computed_tokens + tokens < request.num_prompt_tokens:
            return
        key, full = self.blocks.tail_key(request), self.blocks.full(request)
        if not key:
            return
        if key in self._saves:
            state.tail_saved = True
            return
        assert self._client is not None
        for ref in self._client.take_credits(1, epoch=self._sent_epoch):
            (block,) = self.blocks.pages(resolve(request.request_id), [full])
            job = SaveJob(key, self.blocks.parent(request, full), ref, None)
            orders.saves.append(SaveOrder(self._saves.begin(job), ref.slot, block))
            state.tail_saved = True

    def _depart(self, state: RequestState) -> dict[str, Any] | None:
        """Keeps what is stored of the prompt for who goes on with it. None: there is nothing to be had."""
        request, attachment = state.request, self._attachment()
        if attachment is None or request.status == RequestStatus.FINISHED_ABORTED:
            return None
        if not attachment.peer_address:
            logger.warning_once(
                "kvsieve: do_remote_decode: this engine's store serves no other stores (kvsieve serve "
                "--peer-listen); the prompt will be computed again elsewhere"
            )
            return None
        full = self.blocks.full(request)
        stored = min(self._stored_blocks(state), full)
        keys, tokens = self.blocks.first(request, stored), stored * self.block_tokens
        if state.tail_saved and stored == full:
            keys, tokens = [*keys, self.blocks.tail_key(request)], request.num_prompt_tokens
        self._departures.add(keys)
        self.stats.add(handoffs_out=1)
        return departure_params(attachment, tokens)

    def _stored_blocks(self, state: RequestState) -> int:
        """Of the request's blocks, from the first on, those that the store has or is about to have."""
        return state.known

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _save_full_blocks(
        self, state: RequestState, tokens: int, resolve: ResolveBlockIds, orders: StepOrders
    ) -> None:
        """Orders a save of each block that is full after this step and not known to the store."""
        request, full = state.request, self._full_blocks(state, tokens)
        assert self._client is not None
        if full <= state.known or not self._client.credits:
            return
        wanted = [
            (index, key)
            for index in range(state.known, full)
            if (key := self.blocks.key(request, index)) not in self._saves
        ]
        pages = self.blocks.pages(resolve(request.request_id), [index for index, _ in wanted])
        whole = next((i for i, block in enumerate(pages) if not self.blocks.is_whole(block)), len(pages))
        if whole < len(pages):
            # A sliding window has passed this block before it could be saved.
            state.saves, full = False, wanted[whole][0]
        refs = self._client.take_credits(whole, epoch=self._sent_epoch)
        if len(refs) < whole:  # no free slot now: tried again at the request's next step
            full = wanted[len(refs)][0]
        state.known = full
        for (index, _), ref, block in zip(wanted, refs, pages, strict=False):
            self._order_save(request, index, ref, block, orders)

    def _order_save(
        self, request: Request, index: int, ref: SlotRef, block: BlockPages, orders: StepOrders
    ) -> SaveJob:
        key = self.blocks.key(request, index)
        parent = self.blocks.parent(request, index)
        event = self.blocks.stored_event(request, index) if self._with_events else None
        job = SaveJob(key, parent, ref, event)
        orders.saves.append(SaveOrder(self._saves.begin(job), ref.slot, block))
        return job

    def _full_blocks(self, state: RequestState, tokens: int) -> int:
        """Blocks of the request that are full, and may be saved, once `tokens` more are computed."""
        request = state.request
        computed = request.num_computed_tokens + tokens
        if not self.settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        # Keys exist for confirmed tokens only, so rejected draft tokens are never saved.
        return min(computed // self.block_tokens, self.blocks.known(request))

    def _abandon(self, job: SaveJob) -> None:
        """The block will not be sealed; its slot goes back."""
        self._saves.landed(job)
        self._slots_back.append(job.ref)
        self.stats.add(failed_saves=1)

    def _poll_seals(self) -> None:
        for sealing in self._saves.answered():
            self._sealed(sealing)

    def _sealed(self, sealing: Sealing) -> None:
        error = None if sealing.future.cancelled() else sealing.future.exception()
        if sealing.future.cancelled() or isinstance(error, UnavailableError):
            for job in sealing.jobs:  # slots went with the session
                self._saves.landed(job)
            self.stats.add(failed_saves=len(sealing.jobs))
            return
        if error is not None:
            logger.error("kvsieve: the store refused to seal %d blocks: %s", len(sealing.jobs), error)
            for job in sealing.jobs:
                self._abandon(job)
            return
        for job, result in zip(sealing.jobs, self._seal_results(sealing), strict=True):
            self._saves.landed(job)
            self._count_sealed(job, result)

    def _count_sealed(self, job: SaveJob, result: SealResult) -> None:
        if result is SealResult.DUPLICATE:
            self.stats.add(duplicate_blocks=1)
            return
        self.stats.add(saved_blocks=1)
        if job.event is not None:
            self._events.append(job.event)

    def _seal_results(self, sealing: Sealing) -> list[SealResult]:
        results: list[SealResult] = sealing.future.result()
        return results

    # The session

    def _attachment(self) -> Attachment | None:
        return self._client.attachment if self._client is not None else None

    def _forget_session(self) -> None:
        """The session is over: its slots, leases and jobs mean nothing any more."""
        self._sent_epoch, self._unready = 0, 0
        self._saves.forget()
        self._leases_back.clear()
        self._slots_back.clear()
        self._departures.forget()
        for state in self._requests.values():
            state.known, state.saves = 0, True

    def _give_back(self) -> None:
        """Returns leases and unused slots. Apart, because a release is all or nothing."""
        if self._client is None or not self._sent_epoch:
            return
        if self._leases_back:
            self._client.release_async(self._leases_back, epoch=self._sent_epoch)
            self._leases_back = []
        if self._slots_back:
            self._client.release_async((), self._slots_back, epoch=self._sent_epoch)
            self._slots_back = []
