"""The scheduler's half in sparse mode: a block leaves the GPU only once it is in the arena, and stays there
for as long as its request reads it.

What is on the GPU is the managers' and the ledger's (residency.py); this half tells the ledger what is
durable, and the workers what the ledger has decided. A local prefix hit is one of the indexer's plane only,
so it counts as far as the store has the blocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvsieve_connector.handoff import Part
from kvsieve_connector.metadata import (
    HostBacked,
    HostBlocks,
    LoadOrder,
    StepOrders,
    WorkerReport,
)
from kvsieve_connector.requests import RequestState, SaveJob, Sealing
from kvsieve_connector.scheduler import ResolveBlockIds, SchedulerHalf
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_connector.sparse.budget import SlotBudget
from kvsieve_connector.sparse.hint_orders import HintOrders
from kvsieve_connector.sparse.hints import hint_key
from kvsieve_connector.sparse.hosts import Host, Hosts, Place
from kvsieve_connector.sparse.manager import bind_managers
from kvsieve_connector.sparse.plan import HostPlan, SparsePlan
from kvsieve_connector.sparse.releases import Releases
from kvsieve_connector.sparse.residency import Holding, Residency
from kvsieve_connector.sparse.spec import main_groups
from kvsieve_store.client import Attachment, Held, SealEntry, SealResult, StoreClient
from kvsieve_store.sizes import size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvsieve")

GROWTH_TOKENS = 4096
"""Slots are held for so many tokens beyond those that a request has, or for all that it may ever have."""


class SparseScheduler(SchedulerHalf):
    """See the module's docstring. Raises ValueError for what sparse mode can't serve."""

    _takes_tails = False  # a request begins with blocks that are read from the arena, whole

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: ConnectorSettings,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, settings)
        self.plan = self._plan_of(vllm_config, settings)
        self._max_model_len = vllm_config.model_config.max_model_len
        self._overlap = int(vllm_config.max_concurrent_batches)
        self._releases = Releases(self._overlap)
        groups = range(len(kv_cache_config.kv_cache_groups))
        self._indexers = sorted(set(groups) - set(main_groups(kv_cache_config)))
        """KV groups that are loaded for a prefix hit: the indexer's, if there is one."""
        self._residency: Residency | None = None
        self._manager: KVCacheManager | None = None
        self._hosts = Hosts()
        self._budget = SlotBudget(clock, rng or random.Random())
        self._found: list[Host] = []
        """Began with blocks of the store; the workers are not told yet."""
        self._ended: list[Host] = []
        """The workers are not told yet."""
        self._with_hints = settings.prefetch != "none" and self.plan.hot_blocks > 0
        self._hints = HintOrders(self.blocks, self._saves, self._hosts, self._releases)
        self._too_small: Attachment | None = None
        self._reports_from = 0
        """From the step after this one on, reports of the workers on the attachment sent last are in."""

    def _plan_of(self, vllm_config: VllmConfig, settings: ConnectorSettings) -> HostPlan:
        return SparsePlan.of(vllm_config, settings)

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Raises ValueError when vLLM has planned the cache otherwise than sparse mode needs it."""
        self._manager = kv_cache_manager
        self._residency = bind_managers(kv_cache_manager, self.plan, self._max_running, self._holding_ended)

    def check_attachment(self, attachment: Attachment) -> None:
        need = self._max_model_len // self.block_tokens
        if attachment.slots < need:
            raise ValueError(
                f"kvsieve: sparse mode: a request of max_model_len={self._max_model_len} tokens fills {need} "
                f"slots, but this pool has room for {attachment.slots}; give the store at least "
                f"{size(need * attachment.slot_bytes)} (kvsieve serve --pool-size, and the pool's quota if "
                "there is one), or lower --max-model-len"
            )

    # Matching and loading

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the request can begin with beyond `local_tokens`, which are in the GPU's prefix cache;
        True: their indexer blocks are to be loaded first.

        None: ask again, because the store has not answered, has no slots, or lacks blocks of the local hit:
        these are on their way there, or have just been dropped from the prefix cache.
        """
        state = self._requests.setdefault(request.request_id, RequestState(request))
        if not self._has_arrived(request, local_tokens):
            return None, False
        if self._is_usable and not self._budget.is_turn(request.request_id):
            return None, False
        local, have = local_tokens // self.block_tokens, 0
        if state.match is not None or self._start_match(state):
            assert state.match is not None
            if not state.match.done():
                if not self._is_late(state):
                    return None, False
                self.stats.add(match_timeouts=1)
                self._drop_match(state)
            elif (match := self._match_result(state)) is not None:
                if match.epoch != self._sent_epoch or self._releases.step < self._reports_from:
                    return None, False  # the workers are told of the session, and say whether they reach it
                if self._unready:
                    self._unask(state)
                else:
                    have = len(match.refs)
        if have < local:
            if not self._will_match(state, range(have, local)):
                self._evict(request, range(have, local))
            return None, False
        if not self._has_room(request, have):
            return None, False
        tokens = (have - local) * self.block_tokens
        return tokens, tokens > 0 and bool(self._indexers)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The scheduler has given blocks to the request. It comes twice for one that loads: before and
        after."""
        state = self._requests.get(request.request_id)
        holding = self._ledger.get(request.request_id)
        if state is None or holding is None or request.request_id in self._hosts:
            return
        host = self._hosts[request.request_id] = Host(request, self._expected_blocks(request))
        self._budget.forget(request.request_id)
        begins_with, state.asked_again = holding.durable, False
        if not begins_with:
            self._drop_match(state)
            return
        assert state.match is not None
        match = state.match.result()
        state.match = None
        host.found(match.refs[:begins_with], match.epoch, match.lease_ids)
        self._found.append(host)
        if self._with_hints:
            self._hints.ask(host, begins_with)
        local = begins_with - external_tokens // self.block_tokens
        self.stats.add(matched_blocks=begins_with)
        if external_tokens and self._indexers:
            pages = self.blocks.pages(blocks.get_block_ids(), range(local, begins_with))
            refs = tuple(match.refs[local:begins_with])
            self._new_loads.append(LoadOrder(request.request_id, state.instance, refs, tuple(pages)))

    def loads_ended(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """Leases stay: the main plane is read from the arena while the request lives."""
        for req_id in failed:
            if req_id in self._requests:
                self._requests[req_id].lookups = False

    def _will_match(self, state: RequestState, missing: range) -> bool:
        """Whether the store may come to have these blocks of the request, which it was not found to have.

        It has not looked since they were sealed, or they are on their way there.
        """
        if self._is_coming(state.request, missing[-1]) or self._is_coming(state.request, missing[0]):
            state.asked_again = False
            return True
        if state.asked_again or not state.lookups:
            state.asked_again = False
            return False
        self._unask(state)
        state.asked_again = self._start_match(state)
        return state.asked_again

    def _is_coming(self, request: Request, index: int) -> bool:
        """Whether the block is on its way to the store, or another request has it and a slot for it."""
        if not self._is_usable:
            return False
        key = self.blocks.key(request, index)
        return key in self._saves or self._hosts.will_save(index, key, self.blocks)

    def _evict(self, request: Request, indices: range) -> None:
        """Drops the blocks from the GPU's prefix cache: they are hit no more."""
        assert self._manager is not None
        pool, block_ids = self._manager.block_pool, set()
        for index in indices:
            key = request.block_hashes[(index + 1) * self.blocks.hashes - 1]
            while found := pool.get_cached_block(key, self._indexers):
                pool.evict_blocks({found[0].block_id})
                block_ids.add(found[0].block_id)
        self.stats.add(evicted_hits=len(block_ids))

    def _unask(self, state: RequestState) -> None:
        self._drop_match(state)
        state.asked_after = -1

    def _drop_matches(self) -> None:
        """Requests that wait give back what they have leased: a request that waits for slots may wait for
        just these; and, when none runs here, another engine's."""
        for req_id, state in self._requests.items():
            if state.match is not None and (req_id != self._budget.waiting or not self._hosts):
                self._unask(state)

    def _has_room(self, request: Request, have: int) -> bool:
        """Whether a request that begins with `have` blocks of the store can start now."""
        if have and not self._ledger.has_room(have):
            return False
        if not self._is_usable:
            return self._fits_gpu(request)
        assert self._client is not None
        need = max(self._expected_blocks(request) - have, 0)
        first = self._budget.waiting
        if self._budget.admits(self._client, request.request_id, self._hosts.owed, need):
            return True
        if self._budget.waiting == request.request_id != first:
            self.stats.add(slot_waits=1)
        return False

    def _fits_gpu(self, request: Request) -> bool:
        """Whether the tokens that the request has fit the GPU without a store. One that does not would be
        preempted again and again; it waits for a store, and others go first."""
        assert self._manager is not None
        blocks = -(-request.num_tokens // self.block_tokens)
        if blocks * len(self.blocks.group_tokens) < self._manager.block_pool.num_gpu_blocks:
            return True
        logger.warning_once("kvsieve: a request that does not fit the GPU without a store waits for one")
        return False

    def _expected_blocks(self, request: Request) -> int:
        tokens = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        return min(tokens, request.num_tokens + GROWTH_TOKENS) // self.block_tokens

    # Saving

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        self._releases.begin_step()
        orders = super().build_orders(output)
        if orders.attachment is not None:
            self._reports_from = self._releases.step + self._overlap - 1
        ended, self._ended = self._ended, []
        orders.host_ended = [host.request.request_id for host in ended]
        if self._is_usable and self._client is not None:
            orders.hint_saves = self._hints.saves(ended, self._client, self._sent_epoch)
        self._tell_of_hosts(orders)
        orders.hint_loads = self._hints.loads(self._client, self._sent_epoch)
        orders.forget_epochs = self._releases.unread(self._hosts.epochs, self._sent_epoch)
        if self._is_usable and self._client is not None:
            self._slots_back += self._budget.maintain(self._client, self._hosts.owed, self._credit_target)
            if self._budget.gave_up:
                self._drop_matches()
        self._release_due()
        self._give_back()
        return orders

    def take_report(self, report: WorkerReport | None) -> None:
        self._release_due()
        super().take_report(report)

    def has_pending_block_frees(self) -> bool:
        """Whether a request that runs has blocks that come free as soon as their copies have landed."""
        if not self._is_usable:
            return False
        return any(h.is_copying and self._ledger.waits_for_saves(req_id) for req_id, h in self._hosts.items())

    def has_pending_work(self) -> bool:
        past = self._releases.has_past(self._sent_epoch)
        return bool(super().has_pending_work() or self._releases or self._ended or self._hints or past)

    def finished(self, request: Request) -> dict[str, Any] | None:
        self._budget.forget(request.request_id)
        return super().finished(request)

    def _count_skipped(self, state: RequestState) -> None:
        host = self._hosts.get(state.request.request_id)
        if host is not None and self._sent_epoch:
            self.stats.add(skipped_saves=len(host.to_save(self._full_blocks(state, 0))))

    # Hand-offs

    def _has_arrived(self, request: Request, local_tokens: int) -> bool:
        """What the GPU has of the prompt is of the indexer's plane only: it needs the blocks all the same."""
        return self._arrivals.is_over(request.request_id, self._client)

    def _parts(self, request: Request) -> list[Part]:
        """The blocks and, if there is one, the hint of the last of those that the request can begin with."""
        parts = super()._parts(request)
        blocks = min(self.blocks.known(request), (request.num_prompt_tokens - 1) // self.block_tokens)
        if self._with_hints and blocks:
            last = self.blocks.key(request, blocks - 1)
            parts.append(Part([hint_key(last)], last, optional=True))
        return parts

    def _stored_blocks(self, state: RequestState) -> int:
        host = self._hosts.get(state.request.request_id)
        if host is None:
            return 0
        return min(host.missing, default=host.known)

    def _save_full_blocks(
        self, state: RequestState, tokens: int, resolve: ResolveBlockIds, orders: StepOrders
    ) -> None:
        """Orders a save of each block that is full after this step and that the request did not begin with.

        Also of one that the store has, or that is on its way there for another request: the request reads its
        own copy.
        """
        request = state.request
        host = self._hosts.get(request.request_id)
        if host is None:
            return
        if host.known + 1 >= host.expected:
            host.expected = max(host.expected, self._expected_blocks(request))
        indices = host.to_save(self._full_blocks(state, tokens))
        if not indices:
            return
        assert self._client is not None
        refs = self._client.take_credits(len(indices), epoch=self._sent_epoch)
        pages = self.blocks.pages(resolve(request.request_id), indices[: len(refs)])
        for index, ref, block in zip(indices, refs, pages, strict=False):
            assert self.blocks.is_whole(block), (
                f"block {index} of {request.request_id} left the GPU before its copy"
            )
            job = self._order_save(request, index, ref, block, orders)
            job.host, job.index = host, index
            host.ordered(index)

    def _seal(self, ready: list[SaveJob], client: StoreClient) -> None:
        """What all ranks have copied is durable. One call per request, so that each has a lease of its own,
        which grows: what the store keeps of leases, and what renews them, is by requests, not by blocks."""
        by_host: dict[Host, list[SaveJob]] = {}
        hints = []
        for job in sorted(ready, key=lambda job: job.index):
            if job.host is None:
                hints.append(job)
            else:
                by_host.setdefault(job.host, []).append(job)
        for host, jobs in by_host.items():
            if host.ended:
                super()._seal(jobs, client)
                continue
            entries = [SealEntry(job.key, job.parent, job.ref) for job in jobs]
            for job in jobs:
                host.put(job.index, Place(self._sent_epoch, job.ref.slot))
            self._ledger.set_durable(host.request.request_id, host.durable)
            lease = host.lease(self._sent_epoch)
            future = client.seal_async(entries, epoch=self._sent_epoch, hold=True, lease=lease)
            self._saves.sent(Sealing(jobs, future))
        if hints:  # after the blocks that they are children of
            super()._seal(hints, client)

    def _seal_results(self, sealing: Sealing) -> list[SealResult]:
        held, host = sealing.future.result(), sealing.jobs[0].host
        if not isinstance(held, Held):
            return super()._seal_results(sealing)
        assert host is not None
        host.leased(held.epoch, held.lease_ids)
        for job, result in zip(sealing.jobs, held.results, strict=True):
            if result is SealResult.DUPLICATE:
                host.kept.append((held.epoch, job.ref))
        self._give_back_after(host)
        return held.results

    def _abandon(self, job: SaveJob) -> None:
        """A block that is read already keeps its slot; another one is saved again."""
        host = job.host
        if host is None:
            self._saves.landed(job)
            self._slots_back.append(job.ref)
            return
        if job.index in host.places:
            self._saves.landed(job)
            self.stats.add(failed_saves=1)
            host.kept.append((self._sent_epoch, job.ref))
            self._give_back_after(host)
            return
        super()._abandon(job)
        if not host.ended:
            host.missing.add(job.index)

    def _count_sealed(self, job: SaveJob, result: SealResult) -> None:
        if job.host is not None:
            super()._count_sealed(job, result)
        elif result is SealResult.SEALED:
            self.stats.add(stored_hints=1)

    # Orders to the workers, and the end of requests

    def _tell_of_hosts(self, orders: StepOrders) -> None:
        for req_id, hot in self._ledger.take_backed():
            orders.host_backed.append(HostBacked(req_id, hot))
            self._hosts[req_id].told = True
        read = {host.request.request_id: range(host.durable) for host in self._found if not host.ended}
        self._found = []
        lost = self._ledger.take_lost()
        self.stats.add(lost_blocks=sum(map(len, lost.values())))
        for req_id, indices in [*read.items(), *lost.items()]:
            self._hosts[req_id].hints = self._with_hints
            places = self._hosts[req_id].places
            by_epoch: dict[int, list[tuple[int, int]]] = {}
            for index in indices:
                by_epoch.setdefault(places[index].epoch, []).append((index, places[index].slot))
            for epoch, blocks in by_epoch.items():
                orders.host_blocks.append(HostBlocks(req_id, epoch, tuple(blocks)))
        self.stats.set(host_backed_requests=self._ledger.host_backed)

    def _holding_ended(self, holding: Holding) -> None:
        """vLLM has taken back the request's blocks: finished, aborted, preempted, or not loaded."""
        host = self._hosts.pop(holding.request_id, None)
        if host is None:
            return
        host.ended = True
        if host.told:
            self._ended.append(host)
        self._releases.add([], (), host.epochs)
        self._give_back_after(host)

    def _give_back_after(self, host: Host) -> None:
        if host.ended:
            self._releases.add(host.leases, host.kept)
            host.leases, host.kept = [], []

    def _release_due(self) -> None:
        leases, slots = self._releases.due(self._sent_epoch)
        self._leases_back += leases
        self._slots_back += slots

    # The session

    @property
    def _is_usable(self) -> bool:
        """Whether the workers can save to the store and read from it."""
        return bool(self._sent_epoch and not self._unready and self._attachment() is not None)

    @property
    def _ledger(self) -> Residency:
        assert self._residency is not None, "no KV cache manager is bound yet"
        return self._residency

    def _attachment(self) -> Attachment | None:
        """A store that is too small, and came after the start, is none."""
        attachment = super()._attachment()
        if attachment is None or attachment is self._too_small:
            return None
        if attachment.epoch != self._sent_epoch:
            try:
                self.check_attachment(attachment)
            except ValueError as error:
                logger.error("%s; serving without a store", error)
                self._too_small = attachment
                return None
        return attachment

    def _forget_session(self) -> None:
        """Requests go on reading the arena that the workers have mapped."""
        self._releases.session_over(self._sent_epoch)
        super()._forget_session()
        self._budget.session_over()
        self._hosts.session_over()
