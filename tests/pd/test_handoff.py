"""A prompt is computed by one engine and decoded by another, each with a store of its own."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from tests.engine.generate import prompt
from tests.pd.conftest import BLOCK, Engine, Host

Hosts = tuple[Host, Host]

seeds = itertools.count(100)


def new_prompt(length: int) -> list[int]:
    return prompt(length, next(seeds))


def prefilled(host: Host, ids: list[int]) -> dict[str, Any]:
    """kv_transfer_params of the prefill engine's answer."""
    answer = host.engine.ask(ids, 1, do_remote_decode=True)
    params: dict[str, Any] = answer["params"]
    return params


LENGTHS = [1000, 10 * BLOCK, 10 * BLOCK + 1, 10 * BLOCK + 2, 20, 2]


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_first(hosts: Hosts, plain: Engine, length: int) -> None:
    prefill, decode = hosts
    ids = new_prompt(length)
    expected = plain.ask(ids)["tokens"]
    params = prefilled(prefill, ids)
    covered = length if length % BLOCK != 1 else length - 1
    params.pop("remote_prefill_cached_tokens", None)  # vLLM's own
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvsieve_store": prefill.address,
        "kvsieve_pool": params["kvsieve_pool"],
        "kvsieve_tokens": covered,
    }
    before = decode.engine.computed
    assert decode.engine.ask(ids, **params)["tokens"] == expected
    assert decode.engine.computed == before + 1
    prefill.settled()
    decode.settled()


@pytest.mark.parametrize("length", [1000, 10 * BLOCK])
def test_decode_first(hosts: Hosts, plain: Engine, length: int) -> None:
    prefill, decode = hosts
    ids = new_prompt(length)
    expected = plain.ask(ids)["tokens"]
    before = decode.engine.computed
    waiting = decode.engine.start(
        ids, do_remote_prefill=True, kvsieve_store=prefill.address, kvsieve_wait_ms=60_000
    )
    while not prefill.metric("kvsieve_peer_waiting_offers"):
        time.sleep(0.01)
    prefilled(prefill, ids)
    assert decode.engine.answer(waiting)["tokens"] == expected
    assert decode.engine.computed == before + 1
    prefill.settled()
    decode.settled()
