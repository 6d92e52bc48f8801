"""Attention over rows of the paged cache and of the arena, with everything real but the attention kernel and
the GPU: whatever is where, the answer is that of dense attention over the true rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import _custom_ops  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager  # noqa: E402

from kvsieve_connector.sparse import warm  # noqa: E402
from kvsieve_connector.sparse.kernel_set import KernelSet  # noqa: E402
from tests.unit.sparse_attention_scene import GARBAGE, LAYERS, LEADERS, Scene  # noqa: E402

FACES = ["common", "flashmla", "flashmla-fp8"]
POLICIES = ["none", "previous-step", "previous-step+margin", "previous-layer", "index-share"]


def _concat(nope: Any, rope: Any, out: Any) -> None:
    out.copy_(torch.cat((nope, rope), 2))


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a vLLM worker has: a workspace, and what only CUDA builds have."""
    monkeypatch.setattr(_custom_ops, "concat_mla_q", _concat)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    reset_workspace_manager()
    init_workspace_manager(torch.device("cpu"))
    yield
    reset_workspace_manager()


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def decoding(scene: Scene, name: str, blocks: int, lost: int = 0) -> None:
    """A request with `blocks` full blocks in its context, `lost` of which only the arena holds."""
    scene.start(name, (blocks + 9) * scene.block)
    scene.fill(name, blocks * scene.block + 1)
    if lost:
        scene.back(name)
        scene.lose(name, *range(lost))


def test_decode_reads_rows_of_the_arena(face: str) -> None:
    scene = Scene(face)
    decoding(scene, "a", blocks=5, lost=4)
    decoding(scene, "b", blocks=3, lost=3)
    for _ in range(8):
        scene.step(["a", "b"])
    counts = scene.counts()
    assert counts["missed_rows"] > 0
    assert counts["gpu_rows"] > 0
    assert counts["unplaced_rows"] == 0
    assert counts["asked_rows"] == counts["gpu_rows"] + counts["hot_rows_hit"] + counts["missed_rows"]


def test_wrong_bytes_in_the_arena_show() -> None:
    """The test's own test."""
    scene = Scene()
    decoding(scene, "a", blocks=5, lost=5)
    for slot in scene.live["a"].slots.values():
        slot.fill_(GARBAGE)
    with pytest.raises(AssertionError):
        scene.step(["a"], pick=lambda name, layer, position: [0, 1])


def test_a_block_is_lost_between_two_steps(face: str) -> None:
    scene = Scene(face)
    decoding(scene, "a", blocks=4, lost=1)
    for lost in range(1, 4):
        scene.step(["a"])
        scene.lose("a", lost)
        scene.step(["a"])
    assert scene.counts()["missed_rows"] > 0


@pytest.mark.parametrize("backed", [False, True], ids=["not backed", "backed, nothing lost"])
def test_requests_whose_rows_are_all_on_the_gpu_decode_beside_others(face: str, backed: bool) -> None:
    scene = Scene(face)
    decoding(scene, "a", blocks=4)
    decoding(scene, "b", blocks=4, lost=4)
    decoding(scene, "c", blocks=1)
    if backed:
        scene.back("a")
    for order in (["a", "b", "c"], ["b", "a"], ["a", "c"], ["c"]):
        scene.step(order)
    assert scene.counts()["unplaced_rows"] == 0


def test_nothing_is_taken_from_the_arena_for_requests_that_are_not_backed(face: str) -> None:
    scene = Scene(face)
    decoding(scene, "a", blocks=4)
    decoding(scene, "b", blocks=2)
    scene.start("c", 6 * scene.block)
    for _ in range(3):
        scene.step(["a", "b"], {"c": 5})
    scene.step(["a", "b", "c"], padding=2)
    counts = scene.counts()
    assert counts["missed_rows"] == counts["hot_rows_hit"] == 0


def test_a_batch_is_mixed_of_decodes_and_chunks_of_prompts(face: str) -> None:
    """The workspace holds one context or two: prompts go in several groups."""
    scene = Scene(face, workspace_blocks=9)
    decoding(scene, "a", blocks=5, lost=4)
    decoding(scene, "b", blocks=2)
    scene.start("c", 7 * scene.block, matched=4)
    scene.start("d", 7 * scene.block)
    scene.start("e", 8 * scene.block, matched=3)
    scene.start("f", 5 * scene.block, matched=2)
    scene.fill("d", 4 * scene.block - 2)
    for chunk in (3, 5, 2):
        scene.step(["a", "b"], {"c": chunk, "d": chunk, "e": chunk, "f": 2})
    groups = scene.runtime.prefill_groups(2)
    assert len(groups) > 1
    assert all(group.rows <= scene.runtime.workspace_rows for group in groups)
    scene.step(["a", "b", "c"], {"e": 2, "d": 1})


def test_a_batch_is_of_prompts_alone(face: str) -> None:
    scene = Scene(face, workspace_blocks=8)
    scene.start("a", 8 * scene.block, matched=5)
    scene.start("b", 6 * scene.block)
    scene.start("c", 7 * scene.block, matched=1)
    for chunk in (2, 6, 3):
        scene.step(prefills={"a": chunk, "b": chunk, "c": chunk})
    assert scene.counts()["asked_rows"] == 0


def test_blocks_are_lost_while_a_prompt_is_computed(face: str) -> None:
    scene = Scene(face, workspace_blocks=8)
    scene.start("a", 7 * scene.block)
    scene.fill("a", 4 * scene.block - 3)
    scene.back("a")
    for lost in range(3):
        scene.lose("a", lost)
        scene.step(prefills={"a": 3 + lost})
    scene.step(["a"])


def test_several_tokens_of_a_request_decode_in_one_step(face: str) -> None:
    scene = Scene(face, query_tokens=2, workspace_blocks=8)
    decoding(scene, "a", blocks=5, lost=5)
    decoding(scene, "b", blocks=3)
    for _ in range(4):
        scene.step(["a", "b"], padding=1)
    scene.start("c", 7 * scene.block, matched=4)
    scene.step(["a", "b"], {"c": 5})
    assert scene.counts()["unplaced_rows"] == 0


def test_a_drafter_attends_to_the_same_requests(face: str) -> None:
    """Its layer runs over the model's batch, and then, over the same rows of the tables, by one token each;
    of what a request decoded, some is rejected."""
    scene = Scene(face, query_tokens=4, hot_blocks=6, workspace_blocks=10, drafter=True)
    decoding(scene, "a", blocks=5, lost=4)
    decoding(scene, "b", blocks=3)
    for kept in ({"a": 1, "b": 4}, {"a": 3, "b": 2}, {"a": 4, "b": 1}):
        scene.step(["a", "b"], padding=1, accepted=kept)
    scene.start("c", 9 * scene.block, matched=4)
    scene.step(["a", "b"], {"c": 5}, accepted={"a": 2})
    scene.step(["a", "b"], {"c": 4}, accepted={"b": 1})
    scene.back("b")
    scene.lose("b", 0, 1)
    scene.step(["b", "a", "c"], accepted={"c": 1, "b": 2})
    assert scene.counts(LAYERS - 1)["missed_rows"] > 0
    assert scene.counts()["unplaced_rows"] == 0


def test_steps_of_fewer_drafts_than_there_may_be(face: str) -> None:
    """Beside whole ones, vLLM takes them for prompts."""
    scene = Scene(face, query_tokens=3, hot_blocks=6, workspace_blocks=8, drafter=True)
    decoding(scene, "a", blocks=5, lost=5)
    decoding(scene, "b", blocks=4, lost=3)
    scene.step(["a", "b"], tokens=1)
    scene.step(["a", "b"], tokens=2, accepted={"a": 1})
    scene.step(["a"], {"b": 2}, accepted={"b": 1})
    scene.step(["b"], {"a": 1})
    assert scene.counts()["missed_rows"] > 0
    assert scene.counts()["unplaced_rows"] == 0


def test_padding_rows_leave_no_trace(face: str) -> None:
    found = []
    for padding in (0, 3):
        scene = Scene(face)
        decoding(scene, "a", blocks=4, lost=4)
        for _ in range(4):
            scene.step(["a"], padding=padding)
        found.append((scene.counts(), scene.tables.tag.tolist()))
    assert found[0] == found[1]


def test_graphs_replayed_without_a_batch_touch_no_request() -> None:
    scene = Scene()
    decoding(scene, "a", blocks=4, lost=4)
    scene.step(["a"])
    before = scene.counts()
    scene.tables.clear_rows()
    topk = torch.zeros(2, scene.topk, dtype=torch.int32)
    rows, counts = scene.runtime.layers[scene.names[0]].swap_in(topk, torch.ones(2, 24, dtype=torch.int32), 8)
    assert (rows == -1).all()
    assert not counts.any()
    assert scene.counts() == before
    scene.step(["a"])


def test_layers_that_are_not_host_backed_take_the_stock_path() -> None:
    scene = Scene()
    decoding(scene, "a", blocks=2)
    for impl in scene.impls:
        impl.host, impl.stock_conversions = None, 0
    scene.step(["a"])
    assert [impl.stock_conversions for impl in scene.impls] == [1] * LAYERS


# Staging


def _recorded(calls: list[tuple[str, int]]) -> Any:
    """Kernels that note (name, address of the first page, or offset of the layer)."""

    def wrap(kernels: KernelSet) -> KernelSet:
        def fetch(staging: Any, addresses: Any, n_blocks: int) -> None:
            calls.append(("fetch", int(addresses[0])))
            staging.fill_(GARBAGE)
            kernels.fetch_pages(staging, addresses, n_blocks)

        def gather(dst: Any, layer: Any, *rest: Any) -> None:
            calls.append(("gather", layer.layer_offset))
            kernels.gather_context(dst, layer, *rest)

        return replace(kernels, fetch_pages=fetch, gather_context=gather)

    return wrap


def _record_attention(impl: Any, offset: int, calls: list[tuple[str, int]]) -> None:
    attend = impl._attend_rows

    def attend_rows(*args: Any) -> Any:
        calls.append(("attend", offset))
        return attend(*args)

    impl._attend_rows = attend_rows


def test_pages_are_fetched_one_context_ahead_and_once(face: str) -> None:
    calls: list[tuple[str, int]] = []
    scene = Scene(face, workspace_blocks=8, kernels=_recorded(calls))
    scene.start("a", 7 * scene.block, matched=5)
    scene.start("b", 6 * scene.block, matched=4)
    for impl, cache in zip(scene.impls, scene.caches, strict=True):
        _record_attention(impl, cache.layer_offset, calls)
    for _ in range(2):
        calls.clear()
        scene.step(prefills={"a": 3, "b": 2})
        first = {name: scene.live[name].slots[0].data_ptr() for name in "ab"}
        offsets = [cache.layer_offset for cache in scene.caches]
        items = [(first[name] + offset, offset) for offset in offsets for name in "ab"]
        expected: list[tuple[str, int]] = [("fetch", items[0][0])]
        for (_, offset), following in zip(items, [*items[1:], None], strict=True):
            expected.append(("gather", offset))
            if following is not None:
                expected.append(("fetch", following[0]))
            expected.append(("attend", offset))
        assert calls == expected


def test_nothing_is_fetched_ahead_across_to_a_drafter(face: str) -> None:
    calls: list[tuple[str, int]] = []
    scene = Scene(face, workspace_blocks=8, drafter=True, query_tokens=2, kernels=_recorded(calls))
    scene.start("a", 7 * scene.block, matched=5)
    for impl, cache in zip(scene.impls, scene.caches, strict=True):
        _record_attention(impl, cache.layer_offset, calls)
    scene.step(prefills={"a": 3})
    names = [name for name, _ in calls]
    ahead = ["fetch", *(["gather", "fetch", "attend"] * (LAYERS - 2)), "gather", "attend"]
    assert names == [*ahead, "fetch", "gather", "attend"]


def test_contexts_on_the_gpu_are_not_staged(face: str) -> None:
    calls: list[tuple[str, int]] = []
    scene = Scene(face, workspace_blocks=8, kernels=_recorded(calls))
    scene.start("a", 7 * scene.block)
    scene.start("b", 7 * scene.block, matched=4)
    scene.start("c", 7 * scene.block)
    scene.fill("a", 5 * scene.block)
    scene.fill("c", 5 * scene.block)
    scene.step(prefills={"a": 2, "b": 3, "c": 2})
    assert len(scene.runtime.prefill_groups(0)) == 3
    names = [name for name, _ in calls]
    assert names.count("fetch") == LAYERS
    assert names.count("gather") == 3 * LAYERS


# Prefetch


def _scenario(scene: Scene) -> list[Any]:
    """Decodes, prompts, loss and a preemption; all that attention gave."""
    outputs: list[Any] = []
    decoding(scene, "a", blocks=5, lost=4)
    decoding(scene, "b", blocks=3)
    scene.start("c", 9 * scene.block, matched=4)
    for _ in range(3):
        outputs += scene.step(["a", "b"], {"c": 3})
    scene.back("b")
    scene.lose("b", 0, 2)
    for _ in range(4):
        outputs += scene.step(["a", "b"])
    scene.preempt("a")
    outputs += scene.step(["b"], {"c": 2})
    scene.resume("a")
    outputs += scene.step(["b"], {"c": 2, "a": 1})
    for _ in range(4):
        outputs += scene.step(["a", "b"], padding=1)
    return outputs


@pytest.mark.parametrize("query_tokens", [1, 2])
def test_outputs_do_not_depend_on_the_prefetch_policy(query_tokens: int) -> None:
    found = {}
    for policy in POLICIES:
        scene = Scene(policy=policy, query_tokens=query_tokens)
        found[policy] = _scenario(scene)
        counts = scene.counts()
        assert counts["unplaced_rows"] == 0
        assert counts["asked_rows"] == counts["gpu_rows"] + counts["hot_rows_hit"] + counts["missed_rows"]
        assert counts["prefetched_rows_used"] <= counts["prefetched_rows"]
        assert (counts["prefetched_rows"] > 0) == (policy != "none")
    for policy in POLICIES[1:]:
        pairs = zip(found[policy], found["none"], strict=True)
        assert all(torch.equal(ours, plain) for ours, plain in pairs), policy


def test_what_a_leader_picked_is_there_before_its_followers_ask() -> None:
    scene = Scene(policy="index-share", hot_blocks=6)
    decoding(scene, "a", blocks=6, lost=6)
    for _ in range(6):
        scene.step(["a"])
    for layer, leader in enumerate(LEADERS):
        counts = scene.counts(layer)
        if leader == layer:
            assert counts["missed_rows"] > 0
            assert counts["prefetched_rows"] == 0
        else:
            assert counts["missed_rows"] == 0
            assert counts["prefetched_rows_used"] == counts["prefetched_rows"] > 0


def test_what_the_layer_before_picked_is_there() -> None:
    scene = Scene(policy="previous-layer", hot_blocks=6)
    decoding(scene, "a", blocks=6, lost=6)
    for _ in range(5):
        scene.step(["a"], pick=lambda name, layer, position: [position - 20, position - 8])
    assert [scene.counts(layer)["missed_rows"] > 0 for layer in range(LAYERS)] == [True] + [False] * (
        LAYERS - 1
    )


def test_neighbours_of_the_last_list_are_there() -> None:
    """Lists that move by a position a step miss only once, in every layer."""
    scene = Scene(policy="previous-step+margin", hot_blocks=6)
    decoding(scene, "a", blocks=6, lost=6)

    def pick(name: str, layer: int, position: int) -> list[int]:
        return [position - 24 + layer, position - 16 + layer]

    scene.step(["a"], pick=pick)
    assert [scene.counts(layer)["missed_rows"] for layer in range(LAYERS)] == [2] * LAYERS
    for _ in range(5):
        scene.step(["a"], pick=pick)
    assert [scene.counts(layer)["missed_rows"] for layer in range(LAYERS)] == [2] * LAYERS


def test_a_resumed_request_gets_back_the_rows_that_were_hot(face: str) -> None:
    scene = Scene(face, policy="previous-step")
    decoding(scene, "a", blocks=5, lost=5)
    decoding(scene, "b", blocks=5, lost=5)
    for _ in range(5):
        scene.step(["a", "b"])
    hot = [scene.hot_positions("a", layer) for layer in range(LAYERS)]
    assert all(hot)
    scene.preempt("a")
    scene.step(["b"])
    misses = scene.counts()["missed_rows"]
    scene.resume("a")
    scene.step(prefills={"a": 1})
    assert [scene.hot_positions("a", layer) for layer in range(LAYERS)] == hot
    assert scene.counts()["prefetched_rows"] == sum(map(len, hot))
    scene.step(["a"], pick=lambda name, layer, position: sorted(hot[layer])[: scene.topk])
    assert scene.counts()["missed_rows"] == misses


def test_a_large_hot_buffer_is_warmed_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch can look up is bounded by shared memory, not by the size of hot buffers."""
    widths: list[int] = []

    def watched(kernels: KernelSet) -> KernelSet:
        def prefetch(layer: Any, tables: Any, positions: Any) -> None:
            widths.append(positions.shape[1])
            kernels.prefetch(layer, tables, positions)

        return replace(kernels, prefetch=prefetch)

    monkeypatch.setattr(warm, "MOST_POSITIONS", 5)
    scene = Scene(policy="previous-step", hot_blocks=4, kernels=watched)
    decoding(scene, "a", blocks=6, lost=6)
    for _ in range(8):
        scene.step(["a"])
    hot = [scene.hot_positions("a", layer) for layer in range(LAYERS)]
    assert max(map(len, hot)) > 5
    scene.preempt("a")
    scene.resume("a")
    scene.step(prefills={"a": 1})
    assert widths == [4] * 4 * LAYERS
    assert [scene.hot_positions("a", layer) for layer in range(LAYERS)] == hot


def test_hot_rows_come_with_the_last_used_first() -> None:
    scene = Scene(policy="previous-step", hot_blocks=4)
    decoding(scene, "a", blocks=6, lost=6)
    asked: list[list[int]] = []

    def pick(name: str, layer: int, position: int) -> list[int]:
        if layer == 0:
            asked.append([len(asked) * 3, len(asked) * 3 + 1])
        return asked[-1]

    for _ in range(4):
        scene.step(["a"], pick=pick)
    warm = scene.runtime.warm
    assert warm is not None
    rows = warm.hot_rows("a")
    assert rows is not None
    for layer in rows.tolist():
        found = [row for row in layer if row >= 0]
        assert [sorted(found[i : i + 2]) for i in range(0, len(found), 2)] == asked[::-1]
        assert layer[len(found) :] == [-1] * (len(layer) - len(found))
    decoding(scene, "b", blocks=3)
    scene.back("b")
    assert warm.hot_rows("b") is None
    assert warm.hot_rows("c") is None


def test_rows_that_the_arena_has_not_got_are_not_fetched() -> None:
    scene = Scene(policy="previous-step")
    decoding(scene, "a", blocks=6, lost=4)
    assert scene.runtime.warm is not None
    first = 4 * scene.block
    rows = torch.tensor([[-1, first, 3, 3, first + 1]] * LAYERS, dtype=torch.int32)
    scene.runtime.warm.resume("a", rows)
    scene.runtime.warm.resume("nobody", rows)
    scene.step(["a"], pick=lambda name, layer, position: [3])
    assert scene.counts()["prefetched_rows"] == scene.counts()["prefetched_rows_used"] == LAYERS
    assert scene.counts()["missed_rows"] == 0


def test_what_a_policy_without_warm_starts_held_is_not_kept() -> None:
    scene = Scene(policy="none")
    assert scene.runtime.warm is None
    _scenario(scene)
    assert scene.counts()["prefetched_rows"] == 0
