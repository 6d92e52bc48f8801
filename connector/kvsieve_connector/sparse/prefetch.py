"""Prefetch policies: which rows to make present in a layer's hot buffer before its swap-in asks for them.

A policy is data. The GPU runtime and the simulator in bench/traces execute the same descriptors:

- A prefetch never displaces a row that the layer's last swap-in used, so it may fetch less than it is told.
- A row that is present already counts as used, as in a swap-in.
- Window rows, which are on the GPU anyway, are left out.

docs/decisions/0010-prefetch-default.md says which policy is the default, and why.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvsieve_connector.settings import PrefetchName

Source = Literal["previous-step", "previous-layer", "leader"]

NAMES: tuple[str, ...] = get_args(PrefetchName)
"""What `kvsieve.prefetch` may be."""

DEFAULT = "previous-step"
"""Where no layers share an index; see default_name."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """One list of top-k positions to make present before a layer's swap-in.

    source: what the list is, and from when it is known:
      "previous-step": this layer's own, one step ago; before the step starts.
      "previous-layer": that of the layer before, of this step; once that layer's indexer has run.
      "leader": that of the layer whose index this one uses, of this step; once that indexer has run. Exact.
    layer: the layer whose list it is.
    margin: positions on either side of each that are fetched too, as far as there are any.
    """

    source: Source
    layer: int
    margin: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """What to prefetch, layer by layer.

    warm_start: whether a request that begins with blocks of the store gets the rows that were hot where they
      ended (warm.py).
    steps: for each layer, what to prefetch in every step.
    """

    name: str
    warm_start: bool
    steps: tuple[tuple[Prefetch, ...], ...]


def make_policy(
    name: str,
    num_layers: int,
    *,
    leaders: Sequence[int] | None = None,
    margin: int = 1,
) -> Policy:
    """The policy of that name for a model of `num_layers` layers.

    "none": nothing.
    "previous-step": only the warm start. In every later step the previous step's rows are hot anyway: a hot
      buffer holds a step's rows at least, and nothing displaces them before the next swap-in.
    "previous-step+margin": also the positions within `margin` of the previous step's, in every step.
    "previous-layer": also the positions that the layer before picked, in every step.
    "index-share": also, exactly, what a layer's leader picked, where layers share an index.

    leaders: for each layer the layer whose index it uses, itself if its own. None: every layer has its own.
    margin: positions, at least 1; only "previous-step+margin" uses it.

    Raises ValueError for a name that is not in NAMES, and for arguments that name no such policy.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
        raise ValueError(f"no prefetch policy {name!r}; {hint}")
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}, must be at least 1")
    if margin < 1:
        raise ValueError(f"margin is {margin}, must be at least 1 position")
    followed = _leaders(num_layers, leaders)

    def step(layer: int) -> tuple[Prefetch, ...]:
        if name == "previous-step+margin":
            return (Prefetch("previous-step", layer, margin),)
        if name == "previous-layer" and layer > 0:
            return (Prefetch("previous-layer", layer - 1),)
        if name == "index-share" and followed[layer] != layer:
            return (Prefetch("leader", followed[layer]),)
        return ()

    steps = tuple(step(layer) for layer in range(num_layers))
    if name == "index-share" and not any(steps):
        raise ValueError(
            f"prefetch policy {name!r} is for models whose layers share an index, and none of this model's "
            f"{num_layers} layers does; take {DEFAULT!r}"
        )
    return Policy(name, name != "none", steps)


def default_name(num_layers: int, leaders: Sequence[int] | None = None) -> str:
    """The policy that measured best: "index-share" where layers share an index, else "previous-step".

    Raises ValueError for leaders that make_policy would refuse.
    """
    followed = _leaders(num_layers, leaders)
    return "index-share" if any(leader != i for i, leader in enumerate(followed)) else DEFAULT


def _leaders(num_layers: int, leaders: Sequence[int] | None) -> Sequence[int]:
    if leaders is None:
        return range(num_layers)
    if len(leaders) != num_layers:
        raise ValueError(f"leaders names {len(leaders)} layers, must name {num_layers}")
    for layer, leader in enumerate(leaders):
        if not 0 <= leader <= layer or leaders[leader] != leader:
            raise ValueError(
                f"leaders[{layer}] is {leader}, must be {layer} or an earlier layer that has its own index"
            )
    return leaders
