"""The quality benchmark's reference, on a tiny random model, and its texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench.quality import measure, misses, recall, reference  # noqa: E402
from bench.quality.reference import BLOCK_TOKENS, Picks, Reference, block_topk  # noqa: E402
from bench.quality.texts import FORMS, Case, cases  # noqa: E402
from kvsieve_connector.dense.selectors import DEFAULT, SELECTORS  # noqa: E402

CONTEXT = 10 * BLOCK_TOKENS + 5
PICKS = Picks("mean-outlier", 2 * BLOCK_TOKENS)


@pytest.fixture(scope="module")
def model() -> Reference:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.5,
        attn_implementation="kvsieve_block_topk",
    )
    return Reference(transformers.LlamaForCausalLM(config).eval())


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_tokens_decoded_together_are_as_one_by_one(model: Reference) -> None:
    prompt, forced = ids(CONTEXT), ids(40, seed=1)
    together = model.decode(model.prefill(prompt), forced, PICKS)
    cache: Any = model.prefill(prompt)
    alone = [model._forward([token], cache, PICKS, 1)[0] for token in forced]
    assert torch.allclose(together, torch.stack(alone), atol=1e-4)
    assert not torch.allclose(together, model.decode(model.prefill(prompt), forced, None), atol=1e-2)


@pytest.mark.parametrize("picks", [Picks("quest-bounds", 10**6), Picks("mean-key", 0, dense_layers=3)])
def test_a_budget_of_everything_is_dense(model: Reference, picks: Picks) -> None:
    prompt, forced = ids(CONTEXT), ids(20, seed=1)
    cache = model.prefill(prompt)
    assert torch.allclose(model.decode(cache, forced, picks), model.decode(cache, forced, None), atol=1e-4)
    assert cache.get_seq_length() == CONTEXT


def test_a_prompt_may_be_read_in_two(model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the second part's attention is worked out piece by piece."""
    prompt, forced = ids(CONTEXT), ids(20, seed=1)
    whole = model.decode(model.prefill(prompt), forced, PICKS)
    monkeypatch.setattr(reference, "AT_ONCE", 7)
    cache = model.prefill(prompt[:100])
    assert torch.allclose(model.decode(model.prefill(prompt[100:], cache), forced, PICKS), whole, atol=1e-4)


def test_only_what_is_picked_is_read() -> None:
    """The first block, the newest ones and the unfinished one; values elsewhere don't matter."""
    torch.manual_seed(0)
    query, key = torch.randn(4, 1, 8), torch.randn(2, CONTEXT, 8)
    value = torch.randn(2, CONTEXT, 8)
    spoilt = value.clone()
    spoilt[:, BLOCK_TOKENS : 8 * BLOCK_TOKENS] = 1e30
    none = Picks("mean-key", 0)
    assert torch.equal(block_topk(query, key, spoilt, none, 1.0), block_topk(query, key, value, none, 1.0))


@pytest.mark.parametrize("size", [16, 32, 64])
def test_blocks_of_any_size(size: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 70, 8), torch.randn(2, CONTEXT, 8), torch.randn(2, CONTEXT, 8)
    every = Picks("quest-bounds", 10**6, block_tokens=size)
    logits = torch.einsum("hgtd,hsd->hgts", query.view(2, 2, 70, 8), key)
    seen = torch.arange(CONTEXT) <= torch.arange(CONTEXT - 70, CONTEXT)[:, None]
    exact = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, None]
    assert torch.allclose(block_topk(query, key, value, every, 1.0), exact.flatten(0, 1), atol=1e-5)
    few = Picks("mean-key", size, block_tokens=size)
    for position, end, mask in reference.picked_blocks(query, key, few, 1.0):
        assert mask.shape == (2, end - position, position // size)
        assert (mask.sum(-1) == min(few.full_blocks, position // size)).all()


def test_a_buffer_misses_what_was_not_picked_lately() -> None:
    """Against slots that are kept as the picking kernel keeps them: of those not used in a step, the one used
    longest ago goes first, and of like ones the first."""
    torch.manual_seed(0)
    layers = [(torch.randn(4, CONTEXT, 8), torch.randn(2, CONTEXT, 8)) for _ in range(5)]
    picks = Picks("mean-key", 32, block_tokens=16)
    asked, missed = 0, [0] * len(misses.SIZES)
    for query, key in layers[:: misses.EVERY]:
        slots: dict[tuple[int, int], list[tuple[int, int]]] = {
            (head, i): [] for head in range(2) for i in range(len(misses.SIZES))
        }
        step = 0
        for _, _, masks in reference.picked_blocks(query[:, -misses.STEPS :], key, picks, 8**-0.5):
            for mask in masks.unbind(1):
                step += 1
                asked += int(mask.sum()) if step > misses.WARM_UP else 0
                for (head, i), held in slots.items():
                    wanted = mask[head].nonzero().flatten().tolist()
                    held += [(0, -1)] * (int(misses.SIZES[i] * picks.full_blocks) - len(held))
                    absent = sorted(set(wanted) - {block for _, block in held})
                    missed[i] += len(absent) if step > misses.WARM_UP else 0
                    held[:] = [(step if block in wanted else used, block) for used, block in held]
                    for block in absent:
                        held[held.index(min(held, key=lambda slot: slot[0]))] = step, block
    assert 0 < missed[-1] < missed[0]
    assert misses.misses(layers, picks) == [count / asked for count in missed]


def test_recall_is_bounded_by_the_oracle() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, CONTEXT, 8), torch.randn(2, CONTEXT, 8)
    found = recall.recall(query, key, 1.0, (BLOCK_TOKENS, 10 * BLOCK_TOKENS), stride=3, steps=9)
    assert found.shape == (len(SELECTORS) + 2, 2, 2)
    oracle = found[recall.NAMES.index(recall.ORACLE)]
    assert (found[:, 0] <= oracle[0] + 1e-6).all()
    assert abs(found[..., 1] - 1).max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_cases_hide_one_key(form: str) -> None:
    def encode(string: str) -> list[int]:
        return list(string.encode())

    found = list(cases(encode, form, 3000, depths=3, documents=2))
    assert len({bytes(case.key) for case in found}) == 6
    assert [case.depth for case in found] == [1, 0.5, 0] * 2
    for case in found:
        assert bytes(case.prompt).count(bytes(case.key)) == 2
        assert 2000 < len(case.prompt) <= 3000
        assert abs(bytes(case.prompt).index(bytes(case.key)) / 3000 - case.depth) < 0.25


def test_rows(model: Reference) -> None:
    rows = measure.perplexity(model, "x", ids(CONTEXT), 30, [measure.GOAL, PICKS])
    assert [row["selector"] for row in rows] == ["dense", DEFAULT, "mean-outlier"]
    assert rows[0]["ratio"] == 1
    asked = [Case(CONTEXT, 0.5, ids(CONTEXT), [1], [2, 3], [4, 5])]
    rows += measure.needles(model, "filler", asked, [measure.GOAL])
    assert [row["accuracy"] for row in rows[-2:]] == [0, 0]
    assert [goal.limit for goal in measure._goals(rows)] == [1.03, -2]


def test_parts_that_are_not_run_stay_as_they_were() -> None:
    rows = [{"part": "recall"}, {"part": "prose"}]
    before = {"parameters": {"budgets": [1, 2]}, "rows": rows}
    assert measure.kept(before, {"budgets": (1, 2)}, ["prose"]) == rows[:1]
    assert measure.kept(before, {"budgets": (1,)}, ["prose"]) == []
    assert measure.kept(None, {}, ["prose"]) == []
