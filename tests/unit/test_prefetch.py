"""Prefetch policies: what they say to fetch, and what they refuse."""

from __future__ import annotations

import pytest

from kvsieve_connector.sparse.prefetch import (
    DEFAULT,
    NAMES,
    Prefetch,
    default_name,
    make_policy,
)

LEADERS = (0, 0, 2, 2, 2)


def test_none() -> None:
    policy = make_policy("none", 3)
    assert list(policy.steps) == [(), (), ()]


def test_previous_step_only_warms_up() -> None:
    policy = make_policy("previous-step", 3)
    assert list(policy.steps) == [(), (), ()]
    assert policy.warm_start


def test_margin() -> None:
    policy = make_policy("previous-step+margin", 2, margin=3)
    assert list(policy.steps) == [(Prefetch("previous-step", layer, 3),) for layer in (0, 1)]


def test_previous_layer() -> None:
    policy = make_policy("previous-layer", 3)
    assert list(policy.steps) == [(), (Prefetch("previous-layer", 0),), (Prefetch("previous-layer", 1),)]


def test_index_share() -> None:
    policy = make_policy("index-share", 5, leaders=LEADERS)
    assert list(policy.steps) == [
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
