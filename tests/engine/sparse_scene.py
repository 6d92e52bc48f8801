"""An engine in sparse mode without a GPU: vLLM's KV cache manager, our scheduler half, and workers whose
blocks hold a number that says what they should hold. Whatever a step reads is checked.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.v1.request import Request, RequestStatus

from kvsieve_connector.dense.plan import DensePlan
from kvsieve_connector.dense.scheduler import DenseScheduler
from kvsieve_connector.metadata import HintLoad, HintSave, HostFilled, StepOrders, WorkerReport
from kvsieve_connector.settings import parse_settings
from kvsieve_connector.sparse.plan import SparsePlan
from kvsieve_connector.sparse.scheduler import SparseScheduler
from kvsieve_connector.sparse.spec import main_groups
from tests.engine.sparse_vllm import BLOCK, cache_manager, plan_cache, plan_dense_cache, scene_config


class Arena(Protocol):
    """Slot -> what it holds."""

    def __getitem__(self, slot: int) -> Any: ...
    def __setitem__(self, slot: int, what: Any) -> None: ...


@dataclass
class Tables:
    """What the workers know of a host-backed request: its hot blocks, and block -> (epoch, slot). summarised:
    blocks that have a summary, of a dense model on a GPU."""

    hot: tuple[tuple[int, ...], ...]
    pages: dict[int, tuple[int, int]] = field(default_factory=dict)
    summarised: set[int] = field(default_factory=set)


@dataclass
class Step:
    """scheduled: request -> tokens. sampled: request -> its new tokens, and how many drafts were rejected.
    report: what the workers say afterwards."""

    scheduled: dict[str, int]
    sampled: dict[str, tuple[list[int], int]]
    report: WorkerReport
    loaded: list[str]
    failed: list[str]


@dataclass
class OnDevice:
    """A request as the workers know it, ahead of the scheduler. computed: tokens whose rows are right."""

    tokens: list[int]
    computed: int


class Scene:
    """chunk: tokens of a step. overlap: steps in flight at once. late: steps that a copy may take longer.
    drafts: tokens that a drafter adds to each decode step, as vLLM's asynchronous scheduler counts them.
    dense: a dense model, on this device, "" for a DSA model; on a CPU hot_blocks means nothing.
    """

    def __init__(
        self,
        client: Any,
        arenas: dict[int, Arena],
        *,
        pool_mib: int = 12,
        hot_blocks: int = 2,
        window_blocks: int = 1,
        chunk: int = 256,
        overlap: int = 1,
        late: int = 0,
        seqs: int = 8,
        max_model_len: int = 2048,
        layers: int = 10,
        drafts: int = 0,
        dense: str = "",
        seed: int = 0,
    ) -> None:
        self.drafts, self.max_model_len, self.dense = drafts, max_model_len, dense
        self.rejected = 0
        self.rng = random.Random(seed)
        self.client, self.arenas = client, arenas
        self.chunk, self.overlap, self.late, self.seqs = chunk, overlap, late, seqs
        given = {
            "kvsieve.mode": "sparse",
            "kvsieve.window_blocks": window_blocks,
            "kvsieve.endpoint": "unix:///s",
        }
        if dense == "cuda":
            given |= {"kvsieve.budget_tokens": 0, "kvsieve.first_blocks": 0}
            hot_blocks = max(hot_blocks, window_blocks)
        if dense != "cpu":
            given["kvsieve.hot_rows"] = hot_blocks * BLOCK
        settings = parse_settings(given)
        config = scene_config(hot_blocks, chunk, overlap, seqs, max_model_len, dense)
        if dense:
            cache = plan_dense_cache(config, layers, pool_mib << 20, DensePlan.of(config, settings))
        else:
            cache = plan_cache(config, layers, pool_mib << 20, SparsePlan.of(config, settings))
        self.manager = cache_manager(config, cache)
        self.main = main_groups(cache)
        self.groups = len(cache.kv_cache_groups)
        self.indexers = sorted(set(range(self.groups)) - set(self.main))
        self.now = 0.0
        half = DenseScheduler if dense else SparseScheduler
        self.half = half(config, cache, settings, clock=lambda: self.now, rng=self.rng)
        self.half.bind(self.manager)
        self.half.use(client, client.target)
        self.free_at_start = self.manager.block_pool.get_num_free_blocks()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.loading: set[str] = set()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        self.fail_loads: set[str] = set()
        self.bad_copies = 0.0
        self.done: list[str] = []
        self.preempted = 0
        self.in_flight: deque[Step] = deque()
        self.orders: list[StepOrders] = []
        # The workers
        self.gpu: dict[int, Any] = {}
        """Block -> what each of its rows holds."""
        self.device: dict[str, OnDevice] = {}
        self.block_tables: dict[str, list[list[int]]] = {}
        self.tables: dict[str, Tables] = {}
        self.mapped: Any = None
        self.copies: list[tuple[int, int]] = []
        self.steps = 0
        self._prefix: dict[str, list[int]] = {}

    # What a test does

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.waiting.append(request)
            self.half.on_new_request(request)

    def run(self, steps: int = 2000) -> None:
        """Until all is done and the store has everything back. Fails when that takes too many steps."""
        for _ in range(steps):
            if not self.is_busy:
                return
            self.step()
        waits = {name: r.num_computed_tokens for name, r in self.requests.items() if name not in self.done}
        raise AssertionError(f"not done after {steps} steps: {waits}, {len(self.running)} running")

    @property
    def is_busy(self) -> bool:
        busy = any(step.scheduled or step.loaded for step in self.in_flight)
        return bool(self.running or self.waiting or busy or self.half.has_pending_work())

    def step(self) -> None:
        self.steps += 1
        self.now += 0.01
        if len(self.in_flight) >= self.overlap or not (self.running or self.waiting):
            self._process(self.in_flight.popleft() if self.in_flight else None)
        self._execute(self._schedule())
        self.client.tick(self.rng.randint(0, 4) if self.late else 1 << 30)

    def abort(self, name: str) -> None:
        request = self.requests[name]
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting and name not in self.loading:
            self.waiting.remove(request)
        else:
            return
        self._end(request)

    # vLLM's scheduler, as far as it decides on blocks

    def _schedule(self) -> dict[str, tuple[int, Any, bool]]:
        """Request -> (tokens, new blocks, whether the workers get its whole block table)."""
        scheduled: dict[str, tuple[int, Any, bool]] = {}
        budget, preempted, index = self.chunk, False, 0
        while index < len(self.running) and budget:
            request = self.running[index]
            ahead = len(request.spec_token_ids) + request.num_output_placeholders
            tokens = min(request.num_tokens + ahead - request.num_computed_tokens, budget)
            tokens = min(tokens, self.max_model_len - request.num_computed_tokens - 1)
            if tokens <= 0:
                index += 1
                continue
            while (
                blocks := self.manager.allocate_slots(request, tokens, num_lookahead_tokens=self.drafts)
            ) is None:
                victim = self.running[-1]
                if self.half.has_pending_block_frees() or victim.num_in_flight_tokens:
                    break
                self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if blocks is None:
                break
            scheduled[request.request_id] = (tokens, blocks, False)
            budget -= tokens
            index += 1
        # Those that hold blocks, after a load, come first.
        for request in () if preempted else sorted(self.waiting, key=lambda r: not r.num_computed_tokens):
            if not budget or len(self.running) >= self.seqs:
                break
            if (took := self._admit(request, budget)) is None:
                break
            budget -= took[0] if took else 0
            if took:
                scheduled[request.request_id] = took
        return scheduled

    def _admit(self, request: Request, budget: int) -> tuple[int, Any, bool] | tuple[()] | None:
        """None: no blocks for it, nor for those after it. (): not now."""
        name, local, external, wait = request.request_id, 0, 0, False
        hit = self.manager.empty_kv_cache_blocks
        if name in self.loading:
            if name not in self.loaded:
                return ()
            self._load_ended(request)
        if request.num_computed_tokens == 0:
            hit, local, _ = self.manager.get_computed_blocks(request)
            found, wait = self.half.matched_tokens(request, local)
            if found is None:
                return ()
            external = found
        computed = request.num_computed_tokens + local + external
        tokens = 0 if wait else min(request.num_tokens - computed, budget)
        blocks = self.manager.allocate_slots(
            request,
            tokens,
            num_new_computed_tokens=local,
            new_computed_blocks=hit,
            num_external_computed_tokens=external,
            num_lookahead_tokens=0 if wait else self.drafts,
            delay_cache_blocks=wait,
            full_sequence_must_fit=True,
            reserved_blocks=self._reserved_blocks() if wait else 0,
        )
        if blocks is None:
            return None
        self.half.allocated(request, self.manager.get_blocks(name), external)
        request.num_computed_tokens = computed
        if wait:
            self.loading.add(name)
            return ()
        self.waiting.remove(request)
        self.running.append(request)
        return tokens, self.manager.get_blocks(name), True

    def _reserved_blocks(self) -> int:
        """What prompts under way still need: a load must not take it."""
        begun = [r for r in (*self.running, *self.waiting) if 0 < r.num_computed_tokens < r.num_tokens]
        return sum(
            self.manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                new_computed_blocks=self.manager.empty_kv_cache_blocks.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=request.num_computed_tokens,
                num_local_computed_tokens=request.num_computed_tokens,
                num_tokens_main_model=request.num_tokens,
                apply_admission_cap=True,
            )
            for request in begun
        )

    def _load_ended(self, request: Request) -> None:
        name = request.request_id
        self.loading.discard(name)
        self.loaded.discard(name)
        if name in self.failed:
            self.failed.discard(name)
            request.num_computed_tokens = 0
            self.manager.free(request)
        else:
            self.manager.cache_blocks(request, request.num_computed_tokens)

    def _preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.preempted += 1

    def _end(self, request: Request) -> None:
        settled = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.manager.remove_skipped_blocks(request.request_id, settled)
        self.half.finished(request)
        self.manager.free(request)
        self.done.append(request.request_id)

    def _process(self, step: Step | None) -> None:
        for name, tokens in step.scheduled.items() if step else ():
            request = self.requests[name]
            request.num_in_flight_tokens -= tokens
            sampled, rejected = step.sampled[name]
            if name in self.done or request not in self.running or not sampled:
                continue
            request.num_computed_tokens -= rejected
            if self.drafts:
                request.num_output_placeholders -= rejected + len(sampled)
            request.append_output_token_ids(sampled[: request.max_tokens - request.num_output_tokens])
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                self._end(request)
        report = step.report if step else WorkerReport()
        due = [job for when, job in self.copies if when <= self.steps]
        self.copies = [copy for copy in self.copies if copy[0] > self.steps]
        report.saved.update(dict.fromkeys((job for job in due if job not in report.failed), 1))
        self.loaded.update(step.loaded if step else ())
        self.failed.update(step.failed if step else ())
        self.half.loads_ended(step.loaded if step else (), step.failed if step else ())
        self.half.take_report(report)

    # The workers

    def _execute(self, scheduled: dict[str, tuple[int, Any, bool]]) -> None:
        state = SimpleNamespace(resolve_block_ids=self.manager.get_block_ids)
        orders = self.half.build_orders(
            SimpleNamespace(  # type: ignore[arg-type]
                num_scheduled_tokens={name: tokens for name, (tokens, _, _) in scheduled.items()},
                kv_connector_block_state=state,
            )
        )
        self.orders.append(orders)
        step = Step({}, {}, WorkerReport(), [], [])
        self._apply(orders, step)
        for order in orders.loads:
            step.loaded.append(order.req_id)
            if order.req_id in self.fail_loads or not self.mapped or self.mapped.instance != order.instance:
                step.failed.append(order.req_id)
                continue
            arena = self.arenas[self.mapped.epoch]
            for ref, pages in zip(order.refs, order.pages, strict=True):
                assert not any(any(pages[group]) for group in self.main)
                (group,) = self.indexers
                (page,) = pages[group]
                self.gpu[page] = arena[ref.slot]
        for name, (tokens, blocks, whole) in scheduled.items():
            request = self.requests[name]
            if whole:
                self.block_tables[name] = [[] for _ in range(self.groups)]
                self.device[name] = OnDevice(list(request.all_token_ids), request.num_computed_tokens)
            for table, new in zip(self.block_tables[name], blocks.get_block_ids(), strict=True):
                table.extend(new)
            self._check_row(orders, name, tokens)
            step.scheduled[name], step.sampled[name] = tokens, self._forward(name, tokens)
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            if self.drafts and step.sampled[name][0]:
                sampled, rejected = step.sampled[name]
                request.num_output_placeholders += len(sampled) + rejected
                request.spec_token_ids = [-1] * self.drafts
        for save in orders.saves:
            pages = [ids[0] for ids in save.pages]
            (what,) = {self.gpu[page] for page in pages}
            assert len(what) == BLOCK
            assert None not in what, "a row of a rejected draft is saved"
            if not self.mapped or self.rng.random() < self.bad_copies:
                step.report.failed[save.job] = 1
                continue
            self.arenas[self.mapped.epoch][save.slot] = what
            self.copies.append((self.steps + self.rng.randint(0, self.late), save.job))
        self.in_flight.append(step)

    def _apply(self, orders: StepOrders, step: Step) -> None:
        if orders.attachment is not None or orders.detach:
            self.mapped = orders.attachment
            self.copies = []
        for hint in orders.hint_saves:
            assert self.tables[hint.req_id].pages
            self._write_hint(hint, step)
        for name in orders.host_ended:
            del self.tables[name]
        for backed in orders.host_backed:
            assert backed.req_id not in self.tables
            self.tables[backed.req_id] = Tables(backed.hot_blocks)
        for filled in orders.host_filled:
            self._summarise(filled)
        for backed in orders.host_backed:
            for group in backed.hot_blocks:
                self.gpu.update(dict.fromkeys(group, "hot"))
        for host in orders.host_blocks:
            pages = self.tables[host.req_id].pages
            for index, slot in host.blocks:
                assert index not in pages, "told twice"
                pages[index] = (host.epoch, slot)
                self.tables[host.req_id].summarised.add(index)
        for load in orders.hint_loads:
            assert load.epoch == self.mapped.epoch
            self._read_hint(load)
            assert self.tables[load.req_id].pages.keys() >= set(range(load.tokens // BLOCK))
        for epoch in orders.forget_epochs:
            assert not any(epoch == e for t in self.tables.values() for e, _ in t.pages.values())
            del self.arenas[epoch]

    def _write_hint(self, order: HintSave, step: Step) -> None:
        if self.rng.random() < self.bad_copies:
            step.report.failed[order.job] = 1
            return
        self.arenas[self.mapped.epoch][order.slot] = _hint_of(self.half._saves[order.job].parent)
        self.copies.append((self.steps + self.rng.randint(0, self.late), order.job))

    def _read_hint(self, order: HintLoad) -> None:
        last = self.half.blocks.key(self.requests[order.req_id], order.tokens // BLOCK - 1)
        assert self.arenas[order.epoch][order.ref.slot] == _hint_of(last)

    def _summarise(self, filled: HostFilled) -> None:
        """The blocks are the request's, whoever they were given to since, and none is told of twice."""
        name, summarised = filled.req_id, self.tables[filled.req_id].summarised
        for index, block in enumerate(filled.block_ids, filled.first):
            assert index not in summarised
            summarised.add(index)
            want = self._rows(name, index, self.device[name].computed)
            assert len(want) == BLOCK
            assert self._read(block, want) == want, (name, index, "not its block any more")

    def _check_row(self, orders: StepOrders, name: str, tokens: int) -> None:
        """A dense model's host-backed request is known by the block that its newest token goes to."""
        computed = self.device[name].computed
        newest = self.block_tables[name][0][(computed + tokens - 1) // BLOCK]
        found = [row for row in orders.host_rows if row.block == newest]
        told = name in self.tables and self.dense == "cpu"
        if name in self.tables and self.dense == "cuda":
            assert self.tables[name].summarised == set(range(computed // BLOCK))
        assert [row.req_id for row in found] == [name] * told
        prompt = self.requests[name].num_prompt_tokens
        assert all(row.decodes == (tokens == 1 and computed >= prompt) for row in found)

    def _forward(self, name: str, tokens: int) -> tuple[list[int], int]:
        """Reads the whole context, writes the new rows, and samples: new tokens, and drafts rejected."""
        device, table = self.device[name], self.block_tables[name]
        computed = device.computed
        pages = self.tables[name].pages if name in self.tables else {}
        for index in range(-(-computed // BLOCK)):
            want = self._rows(name, index, computed)
            for group in self.indexers:
                assert self._read(table[group][index], want) == want, (name, index, "indexer")
            if index in pages:
                epoch, slot = pages[index]
                assert self.arenas[epoch][slot] == want, (name, index, "arena")
                continue
            for group in self.main:
                assert self._read(table[group][index], want) == want, (name, index, group)
        known = min(tokens, len(device.tokens) - computed)
        drafted = tokens - known
        sampled: list[int] = []
        if computed + known == len(device.tokens):
            sampled = [self.rng.randrange(1000) for _ in range(1 + self.rng.randint(0, drafted))]
        else:
            assert not drafted
        device.tokens += sampled
        device.computed = computed + known + max(len(sampled) - 1, 0)
        # Wrong rows: of drafts that are rejected, and those that the drafter writes by itself.
        end = max(computed + tokens, min(device.computed + self.drafts - 1, self.max_model_len))
        for index in range(computed // BLOCK, -(-end // BLOCK)):
            right = self._rows(name, index, device.computed)
            wrong = (None,) * (min(end - index * BLOCK, BLOCK) - len(right))
            for group in range(len(table)):
                assert table[group][index]
                self.gpu[table[group][index]] = right + wrong
        rejected = drafted - max(len(sampled) - 1, 0)
        self.rejected += rejected
        return sampled, rejected

    def _read(self, page: int, want: tuple[int, ...]) -> Any:
        return self.gpu[page][: len(want)]

    def _rows(self, name: str, index: int, tokens: int) -> tuple[int, ...]:
        """What block `index` of a request holds once `tokens` of it are computed, row by row."""
        prefix = self._prefix.setdefault(name, [0])
        for token in self.device[name].tokens[len(prefix) - 1 : tokens]:
            prefix.append(hash((prefix[-1], token)))
        return tuple(prefix[index * BLOCK + 1 : min((index + 1) * BLOCK, tokens) + 1])

    def check_empty(self) -> None:
        """All GPU blocks are free, the workers know of no request."""
        assert self.manager.block_pool.get_num_free_blocks() == self.free_at_start
        assert not self.tables
        ledger = self.half._ledger
        assert ledger.pages == ledger.host_backed == 0


def _hint_of(key: bytes) -> tuple[int, ...]:
    """What the hint of the block of this key holds here."""
    return (hash(("hint", key)),) * BLOCK
