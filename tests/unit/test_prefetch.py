"""Prefetch policies: what they say to fetch, what they refuse, and what the counts mean."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvsieve_connector.sparse.prefetch import (
    DEFAULT,
    NAMES,
    Counts,
    Policy,
    Prefetch,
    default_name,
    make_policy,
)

LEADERS = (0, 0, 2, 2, 2)


def steps(policy: Policy) -> list[tuple[Prefetch, ...]]:
    return [policy.before(layer) for layer in range(len(policy.steps))]


def test_none() -> None:
    policy = make_policy("none", 3)
    assert steps(policy) == [(), (), ()]
    assert policy.before(1, empty=True) == ()


def test_previous_step_only_warms_up() -> None:
    policy = make_policy("previous-step", 3)
    assert steps(policy) == [(), (), ()]
    assert policy.before(2, empty=True) == (Prefetch("previous-step", 2),)


def test_margin() -> None:
    policy = make_policy("previous-step+margin", 2, margin=3, budget=100)
    assert steps(policy) == [(Prefetch("previous-step", layer, 3, 100),) for layer in (0, 1)]
    assert policy.before(0, empty=True) == (
        Prefetch("previous-step", 0),
        Prefetch("previous-step", 0, 3, 100),
    )


def test_previous_layer() -> None:
    policy = make_policy("previous-layer", 3)
    assert steps(policy) == [(), (Prefetch("previous-layer", 0),), (Prefetch("previous-layer", 1),)]


def test_index_share() -> None:
    policy = make_policy("index-share", 5, leaders=LEADERS)
    assert steps(policy) == [
        (),
        (Prefetch("leader", 0),),
        (),
        (Prefetch("leader", 2),),
        (Prefetch("leader", 2),),
    ]


def test_every_policy_but_none_warms_up() -> None:
    for name in NAMES:
        assert make_policy(name, 5, leaders=LEADERS).warm_start == (name != "none")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("previous-steps", "did you mean 'previous-step'"),
        ("index_share", "did you mean 'index-share'"),
        ("prev-layer", "did you mean 'previous-layer'"),
        ("xyz", "there are none, previous-step, "),
    ],
)
def test_an_unknown_name_is_told_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint) as caught:
        make_policy(name, 3)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": 2, "margin": 0}, "margin is 0"),
        ({"num_layers": 2, "budget": 0}, "budget is 0"),
        ({"num_layers": 2, "leaders": (0,)}, "names 1 layers, must name 2"),
        ({"num_layers": 2, "leaders": (1, 1)}, r"leaders\[0\] is 1"),
        ({"num_layers": 3, "leaders": (0, 0, 1)}, r"leaders\[2\] is 1"),
        ({"num_layers": 3, "leaders": (0, -1, 0)}, r"leaders\[1\] is -1"),
        ({"num_layers": 2}, "none of this model's 2 layers does; take 'previous-step'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("index-share", **arguments)  # type: ignore[arg-type]


def test_default() -> None:
    assert default_name(5, LEADERS) == "index-share"
    assert default_name(5, range(5)) == default_name(5) == DEFAULT


def test_counts() -> None:
    counts = Counts(
        asked_rows=100,
        gpu_rows=20,
        hot_rows_hit=60,
        missed_rows=20,
        prefetched_rows=30,
        prefetched_rows_used=12,
    )
    assert counts.hit_rate == 0.75
    assert counts.prefetched_rows_wasted == 18
    assert counts.swapped_in_bytes(656) == 50 * 656
    assert Counts().hit_rate == 1


def test_counts_have_the_names_of_the_workers_counters() -> None:
    pytest.importorskip("torch")
    from kvsieve_connector.sparse import counters

    assert tuple(field.name for field in fields(Counts)) == counters.NAMES
