"""The benchmark: recall of attention, perplexity and pass keys, by selector, budget and size of blocks,
beside dense; and what hot buffers miss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.quality import misses, recall
from bench.quality.engine import engine_needles
from bench.quality.reference import BLOCK_TOKENS, FIRST, NEWEST, Picks, Reference, load
from bench.quality.texts import FORMS, TEXTS, Case, cases, stretch
from kvsieve_connector.demo.model import cache_dir, ensure_smollm2
from kvsieve_connector.dense.selectors import DEFAULT, SELECTORS
from kvsieve_store.bench.report import Goal, Report

PARTS = ("recall", "misses", "perplexity", *FORMS, "engine")
GOAL, GPU_GOAL = Picks(DEFAULT, 1024), Picks(DEFAULT, 1024, block_tokens=16)
"""What the goals are held against: the defaults of a CPU and of a GPU."""


BLOCKS = (GPU_GOAL.block_tokens, GOAL.block_tokens, 64)
"""Tokens."""


@dataclass(frozen=True)
class Sizes:
    """tokens: of a context. decoded: teacher-forced tokens of each text, for perplexity. depths x documents:
    pass keys in each form. budgets: tokens."""

    tokens: int = 6_144
    decoded: int = 512
    depths: int = 10
    documents: int = 5
    budgets: tuple[int, ...] = (256, 512, 1024, 2048)


SHORT = Sizes(decoded=128, depths=4, documents=1, budgets=(512, 1024))


def measure(sizes: Sizes, parts: Sequence[str] = PARTS, before: Mapping[str, Any] | None = None) -> Report:
    """A row per part, text and picks. before: the record of an earlier run, from which parts that are not
    run now are taken if it was run with the same sizes."""
    from transformers import AutoTokenizer

    path = ensure_smollm2(cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(path)

    def encode(string: str) -> list[int]:
        return tokenizer(string).input_ids

    parameters = {
        **vars(sizes),
        "block_tokens": BLOCK_TOKENS,
        "blocks": BLOCKS,
        "first": FIRST,
        "newest": NEWEST,
    }
    rows = kept(before, parameters, parts)
    if {"recall", "misses"} & set(parts):
        for name in TEXTS:
            layers = recall.attended(path, stretch(encode, name, sizes.tokens))
            rows += _recall(name, layers, sizes.budgets) if "recall" in parts else []
            rows += _misses(name, layers) if "misses" in parts else []
    if set(parts) - {"recall", "misses"}:
        model = load(path)
        if "perplexity" in parts:
            for name in TEXTS:
                ids = stretch(encode, name, sizes.tokens + sizes.decoded + 1)
                rows += perplexity(model, name, ids, sizes.decoded, _variants(sizes.budgets))
        for form in FORMS:
            if form in parts:
                asked = list(cases(encode, form, sizes.tokens, sizes.depths, sizes.documents))
                rows += needles(model, form, asked, _fewer(sizes.budgets))
        if "engine" in parts:
            asked = list(cases(encode, "filler", 3_072, 2, 1))
            rows += engine_needles(path, tokenizer.decode, model, asked, Picks(DEFAULT, 384))
    rows.sort(key=lambda row: PARTS.index(row["part"]))
    return Report("quality", parameters, rows, _goals(rows))


def kept(before: Mapping[str, Any] | None, parameters: Mapping[str, Any], parts: Sequence[str]) -> list[Any]:
    """Rows of an earlier record with these parameters, but for those of `parts`."""
    if before is None or before["parameters"] != json.loads(json.dumps(parameters)):
        return []
    return [row for row in before["rows"] if row["part"] in PARTS and row["part"] not in parts]


def _variants(budgets: Sequence[int]) -> list[Picks]:
    """Every selector at every budget; at the goal's also what else can be set."""
    picks = [Picks(name, budget) for budget in budgets for name in SELECTORS]
    others = [Picks(DEFAULT, GOAL.budget_tokens, dense_layers=layers) for layers in (1, 2)]
    others += [Picks(DEFAULT, budget, block_tokens=GPU_GOAL.block_tokens) for budget in budgets]
    others.append(Picks("mean-outlier", GOAL.budget_tokens, block_tokens=GPU_GOAL.block_tokens))
    others += [
        Picks(DEFAULT, GOAL.budget_tokens, block_tokens=size) for size in BLOCKS if size > BLOCK_TOKENS
    ]
    return [*picks, Picks(DEFAULT, GOAL.budget_tokens, shared=True), *others]


def _fewer(budgets: Sequence[int]) -> list[Picks]:
    """Without what hardly differs: every case takes each of them again."""
    near = (GOAL.budget_tokens // 2, GOAL.budget_tokens)
    return [
        each
        for each in _variants(budgets)
        if (each.selector == DEFAULT or each.budget_tokens in near) and each.dense_layers != 1
    ]


def _recall(text: str, layers: Sequence[Any], budgets: Sequence[int]) -> list[dict[str, Any]]:
    scale = layers[0][0].shape[-1] ** -0.5
    found = np.array([recall.recall(query, key, scale, budgets) for query, key in layers])
    return [
        {
            "part": "recall",
            "text": text,
            "selector": name,
            "shared": bool(shared),
            "budget_tokens": budget,
            "recall": round(float(found[:, i, shared, j].mean()), 4),
            "layers": found[:, i, shared, j].round(4).tolist(),
        }
        for i, name in enumerate(recall.NAMES)
        for shared in (0, 1)
        for j, budget in enumerate(budgets)
    ]


def _misses(text: str, layers: Sequence[Any]) -> list[dict[str, Any]]:
    variants = [GPU_GOAL, Picks("mean-outlier", GOAL.budget_tokens, block_tokens=GPU_GOAL.block_tokens), GOAL]
    return [
        {"part": "misses", "text": text, **_row(picks), "hot": size, "missed": round(share, 4)}
        for picks in variants
        for size, share in zip(misses.SIZES, misses.misses(layers, picks), strict=True)
    ]


def perplexity(
    model: Reference, text: str, ids: list[int], decoded: int, variants: Sequence[Picks]
) -> list[dict[str, Any]]:
    """Of the last `decoded` tokens of ids but one, which are decoded one after another; dense first.

    ratio: to dense. error: standard error of the ratio, by differences token by token.
    """
    start = len(ids) - decoded - 1
    cache = model.prefill(ids[:start])
    targets = torch.tensor(ids[start + 1 :])
    rows = []
    dense = None
    for picks in (None, *variants):
        logits = model.decode(cache, ids[start:-1], picks)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        dense = loss if dense is None else dense
        apart = loss - dense
        ratio = float(apart.mean().exp())
        rows.append(
            {
                "part": "perplexity",
                "text": text,
                **_row(picks),
                "perplexity": round(float(loss.mean().exp()), 3),
                "ratio": round(ratio, 4),
                "error": round(ratio * float(apart.std()) / len(apart) ** 0.5, 4),
            }
        )
    return rows


def needles(
    model: Reference, form: str, asked: Sequence[Case], variants: Sequence[Picks]
) -> list[dict[str, Any]]:
    """Pass keys said right, all digits, after an answer that is begun in decode; dense first."""
    before: list[int] = []
    hits: dict[Picks | None, list[bool]] = {picks: [] for picks in (None, *variants)}
    cache = None
    for case in asked:
        same = _same(before, case.prompt)
        if cache is not None:
            cache.crop(same - len(before))
        cache, before = model.prefill(case.prompt[same:], cache), case.prompt
        ids = case.answer + case.key
        for picks, found in hits.items():
            said = model.decode(cache, ids, picks).argmax(-1).tolist()
            found.append(said[len(case.answer) - 1 : -1] == case.key)
    return [
        {
            "part": form,
            "tokens": asked[0].tokens,
            **_row(picks),
            "cases": len(found),
            "accuracy": round(sum(found) / len(found), 4),
            "depths": [case.depth for case in asked],
            "found": found,
        }
        for picks, found in hits.items()
    ]


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _row(picks: Picks | None) -> dict[str, Any]:
    if picks is None:
        return {
            "selector": "dense",
            "budget_tokens": None,
            "shared": False,
            "dense_layers": None,
            "block_tokens": None,
        }
    return vars(picks)


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        if not any(vars(picks).items() <= row.items() for picks in (GOAL, GPU_GOAL)):
            continue
        blocks = f"blocks of {row['block_tokens']}"
        if row["part"] == "perplexity":
            what = f"perplexity, {row['text']}, {blocks}, of dense"
            goals.append(Goal(what, row["ratio"], 1.03, "x", False))
        elif row["part"] in FORMS:
            dense = next(each for each in rows if (each["part"], each["selector"]) == (row["part"], "dense"))
            apart = 100 * (row["accuracy"] - dense["accuracy"])
            what = f"pass keys in {row['part']}, {row['cases']} cases, {blocks}, to dense"
            goals.append(Goal(what, round(apart, 1), -2.0, "points"))
    return goals


def main(arguments: Sequence[str] | None = None) -> None:
    from bench.output import OUT, save

    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer cases: some minutes")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="others stay as the last run had them"
    )
    args = parser.parse_args(arguments)
    last = OUT / "quality.json"
    before = json.loads(last.read_text()) if last.exists() else None
    save(measure(SHORT if args.short else Sizes(), args.parts, before))


if __name__ == "__main__":
    main()
