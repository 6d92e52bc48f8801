"""The connector's settings: `kv_connector_extra_config`, keys prefixed `kvsieve.`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvsieve_store.addresses import default_socket

NAME = "KVSieveConnector"
"""The connector's name in `kv_transfer_config`."""

PREFIX = "kvsieve."

PrefetchName = Literal["none", "previous-step", "previous-step+margin", "previous-layer", "index-share"]
"""What each of them fetches: sparse/prefetch.py."""

SelectorName = Literal["quest-bounds", "mean-key", "mean-outlier", "part-means"]
"""How each of them picks blocks: dense/selectors.py."""


class ConnectorSettings(BaseModel):
    """One field per key; `kvsieve.match_timeout_ms` is `match_timeout_ms` here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["cache", "sparse"] = "cache"
    """cache: whole blocks to the store and back. sparse: DSA models read the main plane from the arena; dense
    models attend to a part of their blocks, which is an approximation."""

    endpoint: str = Field(default_factory=lambda: f"unix://{default_socket()}")
    """Where the store listens: unix:///path or host:port. Default: where this user's store listens."""

    pool: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the pool. Default: the model, as given to vLLM."""

    model_id: str | None = Field(default=None, min_length=1, max_length=256)
    """What the model's weights are known by, for hosts on which its path or files' times differ. Default: the
    path, and its files' names, sizes and times."""

    connect_timeout_ms: int = Field(default=2_000, ge=0, le=60_000)
    """How long the engine's start waits for the store. Past it, serving starts without."""

    match_timeout_ms: int = Field(default=1_000, ge=1, le=60_000)
    """How long a request waits for the answer to its match before it is computed without."""

    fetch_timeout_ms: int = Field(default=2_000, ge=0, le=60_000)
    """With a store that has a directory: how much longer a request waits for blocks that other stores have.
    0: they are not asked."""

    fetch_min_blocks: int = Field(default=8, ge=1)
    """Fewest blocks of a request that its store must lack for other stores to be asked."""

    credits: int | None = Field(default=None, ge=1, le=16_384)
    """Slots kept granted ahead. Default: four steps' worth of full blocks."""

    save_decode: bool = True
    """Whether blocks that fill while decoding are saved too, or only those of the prompt."""

    handoff_lease_ms: int = Field(default=60_000, ge=1, le=600_000)
    """Prefill side of a hand-off: how long a finished prompt is kept unless it is pulled before."""

    handoff_wait_ms: int = Field(default=1_000, ge=0, le=600_000)
    """Decode side of a hand-off: how long it goes on without a new block, unless the request says."""

    handoff_timeout_ms: int = Field(default=120_000, ge=1, le=600_000)
    """Decode side of a hand-off: how long it may take in all."""

    hot_rows: int | None = Field(default=None, ge=1)
    """Sparse mode on GPUs: rows (tokens) of a request's hot buffer, per layer, in whole blocks. Default: 1.5
    times the top-k for each token that a request decodes; of a dense model, twice its budget with first and
    newest blocks."""

    window_blocks: int = Field(default=2, ge=1, le=64)
    """Sparse mode: newest full blocks of a request that stay on the GPU, or in vLLM's pool on a CPU."""

    prefetch: PrefetchName | None = None
    """Sparse mode: which rows are fetched before a layer asks for them. Default: "index-share" where layers
    share an index, else "previous-step"."""

    sharded_fetch: Literal["auto"] | bool = False
    """Sparse mode with tensor parallelism: each rank fetches its share of rows from the arena, and reads
    the others' from their GPUs. auto: where NVLink joins them. true: the engine does not start without."""

    budget_tokens: int = Field(default=1024, ge=0, le=1 << 30)
    """Sparse mode of dense models: tokens that a decode step attends to beside the first and the newest
    blocks, in whole blocks."""

    first_blocks: int = Field(default=1, ge=0, le=1 << 24)
    """Sparse mode of dense models: first blocks of a request that are always attended to."""

    selector: SelectorName | None = None
    """Sparse mode of dense models: how blocks are picked. Default: "part-means"."""

    dense_layers: int = Field(default=0, ge=0)
    """Sparse mode of dense models on CPUs: first layers that attend to all."""

    host_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    """Sparse mode of dense models on GPUs: tokens of all requests that summaries have room for, in GPU memory
    beside the pool. Default: what max_num_seqs requests of max_model_len have, at most 1,048,576."""

    exact_in_pool: bool = False
    """Sparse mode of dense models on GPUs: requests attend to all while all of their blocks are in the pool,
    which depends on what else runs. False: those that are host-backed pick from the start."""

    @field_validator(
        "connect_timeout_ms",
        "match_timeout_ms",
        "credits",
        "hot_rows",
        "window_blocks",
        "budget_tokens",
        "first_blocks",
        "dense_layers",
        "host_tokens",
        mode="before",
    )
    @classmethod
    def _number(cls, given: object) -> object:
        """Else true would be 1."""
        if isinstance(given, bool):
            raise ValueError("a number is expected")
        return given

    @field_validator("model_id")
    @classmethod
    def _printable(cls, given: str | None) -> str | None:
        """An id out of a file may end in a newline, and be another one so."""
        if given is not None and (given != given.strip() or not given.isprintable()):
            raise ValueError("printable characters without blanks at the ends are expected")
        return given

    @field_validator("sharded_fetch", mode="before")
    @classmethod
    def _true_false_or_auto(cls, given: object) -> object:
        if given != "auto" and not isinstance(given, bool):
            raise ValueError('true, false or "auto" is expected')
        return given


def parse_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Settings from `kv_connector_extra_config`; keys of others (without the prefix) are left alone.

    Raises ValueError, which names each bad key and, where one is close, the key that was meant.
    """
    known = ConnectorSettings.model_fields
    given = {k.removeprefix(PREFIX): v for k, v in extra.items() if str(k).startswith(PREFIX)}
    for key in extra.keys() & known.keys():
        raise ValueError(f"kv_connector_extra_config: unknown key {key}; did you mean {PREFIX}{key}?")
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            raise ValueError(f"kv_connector_extra_config: unknown key {PREFIX}{key}{hint}")
    try:
        return ConnectorSettings(**given)
    except ValidationError as error:
        problems = "; ".join(
            f"{PREFIX}{e['loc'][0]}: {e['msg'].removeprefix('Value error, ')}, got {e['input']!r}"
            for e in error.errors()
        )
        raise ValueError(f"kv_connector_extra_config: {problems}") from None
