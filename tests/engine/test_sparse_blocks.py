"""Requests, copies, preemptions and hits in any order: each block can be read, and none is held twice."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.request import Request

from tests.engine.sparse_vllm import BLOCK, Engine, dense_plan, new_request, sparse_plan, tokens_of


class Blocks(RuleBasedStateMachine):
    """Requests come, grow, are saved late, are preempted and finish, in a pool that is too small for them.

    `content` is what the GPU's main blocks hold; `tables` are the workers' block tables, append-only.
    """

    @initialize(hot=st.integers(1, 4), window=st.integers(1, 3), seqs=st.sampled_from([2, 64]))
    def begin(self, hot: int, window: int, seqs: int) -> None:
        self.start(sparse_plan(hot_blocks=hot, window_blocks=window), seqs)

    def start(self, plan: Any, seqs: int) -> None:
        self.engine = Engine(10, 12 << 20, plan, 2048, in_flight=512, seqs=seqs)
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.store: set[bytes] = set()
        self.content: dict[int, tuple[Any, ...]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.host: dict[str, set[int]] = {}
        self.life: dict[str, int] = {}
        self.count = 0

    @rule(family=st.integers(0, 2), blocks=st.integers(1, 24), more=st.integers(1, 64))
    def new(self, family: int, blocks: int, more: int) -> None:
        """Prompts of a family share a prefix."""
        self.count += 1
        name = f"r{self.count}"
        tokens = tokens_of(family, blocks * BLOCK) + tokens_of(10 + self.count, more)
        self.requests[name] = new_request(name, tokens)
        self.waiting.append(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 256))
    def admit(self, data: Any, chunk: int) -> None:
        name = data.draw(st.sampled_from(self.waiting))
        request, engine = self.requests[name], self.engine
        keys = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        matched = next((i for i, key in enumerate(keys) if key not in self.store), len(keys))
        # As the scheduler half does it: the indexer's blocks that the store does not have can't be used.
        managers = engine.manager.coordinator.single_type_managers
        indexers = [m.kv_cache_group_id for m in managers if m not in engine.main]
        for key in keys[matched:] if indexers else ():
            while found := engine.pool.get_cached_block(key, indexers):
                engine.pool.evict_blocks({found[0].block_id})
        if not engine.admit(request, chunk, matched):
            assert name not in engine.live
            return
        self.waiting.remove(name)
        self.life[name] = self.life.get(name, 0) + 1
        self.host[name] = set(range(matched))
        self.tables[name] = [[] for _ in engine.main]
        self._ran(name)

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), chunk=st.integers(1, 256), in_flight=st.booleans())
    def step(self, data: Any, chunk: int, in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.live)))
        request = self.requests[name]
        if request.num_tokens + chunk >= 2048:
            return
        before = request.num_computed_tokens
        if self.engine.step(name, chunk):
            request.num_in_flight_tokens = request.num_computed_tokens - before if in_flight else 0
        self._ran(name)

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def save(self, data: Any) -> None:
        self.engine.save(data.draw(st.sampled_from(sorted(self.engine.live))))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def ack(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.live)))
        live = self.engine.live[name]
        self.engine.ack(name)
        self.store.update(map(bytes, live.request.block_hashes[: live.ordered]))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), preempted=st.booleans())
    def end(self, data: Any, preempted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.free(name)
        assert self.engine.ended.pop().request_id == name
        del self.tables[name], self.host[name]
        if preempted:
            self.requests[name].num_computed_tokens = 0
            self.requests[name].num_in_flight_tokens = 0
            self.waiting.append(name)

    def _ran(self, name: str) -> None:
        """The workers get new blocks, and the step writes to them. Hot blocks are written first."""
        for backed, groups in self.engine.residency.take_backed():
            for group, ids in enumerate(groups):
                assert len(ids) == self.engine.plan.hot_blocks
                self.content.update(dict.fromkeys(ids, ("hot", backed, group)))
        for group, manager in enumerate(self.engine.main):
            table = self.tables[name][group]
            for index, block in list(enumerate(manager.req_to_blocks.get(name, ())))[len(table) :]:
                table.append(block.block_id)
                if not block.is_null:
                    self.content[block.block_id] = (name, self.life[name], group, index)

    @invariant()
    def every_block_can_be_read(self) -> None:
        """Lost blocks come once, and only durable ones; all others are where the workers think they are."""
        if not hasattr(self, "engine"):
            return
        for name, indices in self.engine.residency.take_lost().items():
            holding = self.engine.residency.get(name)
            assert all(index < holding.durable for index in indices)
            assert not self.host[name] & set(indices)
            self.host[name].update(indices)
        for name, tables in self.tables.items():
            for group, table in enumerate(tables):
                for index, block in enumerate(table):
                    if index not in self.host[name]:
                        assert self.content[block] == (name, self.life[name], group, index)

    @invariant()
    def every_block_is_held_once(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, held = self.engine, []
        for manager in engine.main:
            for name in engine.live:
                held += [b for b in manager.req_to_blocks.get(name, ()) if not b.is_null]
                held += manager._hot.get(name, ())
        ids = {block.block_id for block in held}
        assert len(ids) == len(held)
        assert all(block.ref_cnt == 1 for block in held)
        in_use = [b for b in engine.pool.blocks if b.ref_cnt and not b.is_null]
        assert len(in_use) == engine.free_at_start - engine.pool.get_num_free_blocks()

    @invariant()
    def no_request_holds_more_than_it_may(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert engine.residency.pages < engine.plan.pages(engine.cache.num_blocks)
        assert engine.residency.host_backed <= engine.residency._max_host_backed
        for name in engine.live:
            holding, counts = engine.residency.get(name), engine.pinned(name)
            assert len(set(counts)) == 1
            late = holding.wanted - (holding.limit if holding.host_backed else engine.plan.hot_blocks)
            assert counts[0] <= engine.main[0].max_admission_blocks_per_request + max(late, 0)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine.live):
            self.engine.free(name)
        assert self.engine.pool.get_num_free_blocks() == self.engine.free_at_start
        assert self.engine.residency.pages == self.engine.residency.host_backed == 0


class DenseBlocks(Blocks):
    """The same of a dense model: one KV group, no hot buffer, no prefix cache of vLLM's."""

    @initialize(window=st.integers(1, 3), seqs=st.sampled_from([2, 64]))
    def begin(self, window: int, seqs: int) -> None:  # type: ignore[override]
        self.start(dense_plan(window_blocks=window), seqs)


for machine in (Blocks, DenseBlocks):
    machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestBlocks = Blocks.TestCase
TestDenseBlocks = DenseBlocks.TestCase
