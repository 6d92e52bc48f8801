"""A prompt is computed by one engine and decoded by another, each with a store of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.generate import prompt
from tests.pd.conftest import BLOCK, WAIT, Engine, Host

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
    wait_for(lambda: prefill.metric("kvsieve_peer_waiting_offers"))
    prefilled(prefill, ids)
    assert decode.engine.answer(waiting)["tokens"] == expected
    assert decode.engine.computed == before + 1
    assert 'method="Announce"' in prefill.store.metrics()
    prefill.settled()
    decode.settled()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


class Halfway:
    """A decode request that has pulled the first half of its prompt and waits for the other, which
    never comes."""

    def __init__(self, hosts: Hosts, wait_ms: int = 60_000) -> None:
        prefill, decode = hosts
        self.blocks = 15
        self.prompt = new_prompt(30 * BLOCK)
        prefilled(prefill, self.prompt[: self.blocks * BLOCK])
        pulled = decode.metric("kvsieve_peer_pulled_blocks_total")
        self.computed = decode.engine.computed
        self.incomplete = decode.engine.count("incomplete_handoffs")
        self.request = decode.engine.start(
            self.prompt, do_remote_prefill=True, kvsieve_store=prefill.address, kvsieve_wait_ms=wait_ms
        )
        wait_for(lambda: decode.metric("kvsieve_peer_pulled_blocks_total") == pulled + self.blocks)
        wait_for(lambda: prefill.metric("kvsieve_peer_waiting_offers"))


def test_the_prefill_hosts_store_is_killed(hosts: Hosts, plain: Engine) -> None:
    prefill, decode = hosts
    halfway = Halfway(hosts)
    prefill.store.kill()
    assert decode.engine.answer(halfway.request)["tokens"] == plain.ask(halfway.prompt)["tokens"]
    assert decode.engine.computed == halfway.computed + len(halfway.prompt) - halfway.blocks * BLOCK
    assert decode.engine.count("incomplete_handoffs") == halfway.incomplete + 1
    decode.settled()
    prefill.store.start()
    prefill.engine.wait_attached()
    prefill.settled()


def test_the_decode_hosts_store_is_killed(hosts: Hosts, plain: Engine) -> None:
    prefill, decode = hosts
    halfway = Halfway(hosts)
    decode.store.kill()
    assert decode.engine.answer(halfway.request)["tokens"] == plain.ask(halfway.prompt)["tokens"]
    assert decode.engine.computed == halfway.computed + len(halfway.prompt)
    decode.engine.settled()
    prefill.settled()
    decode.store.start()
    decode.engine.wait_attached()
    decode.settled()


def test_the_decode_request_is_aborted(hosts: Hosts) -> None:
    prefill, decode = hosts
    halfway = Halfway(hosts)
    decode.engine.abort(halfway.request)
    decode.settled()
    prefill.settled()


def test_nothing_comes_for_so_long(hosts: Hosts, plain: Engine) -> None:
    prefill, decode = hosts
    halfway = Halfway(hosts, wait_ms=1500)
    assert decode.engine.answer(halfway.request)["tokens"] == plain.ask(halfway.prompt)["tokens"]
    assert decode.engine.computed == halfway.computed + len(halfway.prompt) - halfway.blocks * BLOCK
    decode.settled()
    prefill.settled()


def test_the_prefill_request_is_aborted(hosts: Hosts, plain: Engine) -> None:
    prefill, decode = hosts
    ids = new_prompt(1900)
    waiting = decode.engine.start(
        ids, do_remote_prefill=True, kvsieve_store=prefill.address, kvsieve_wait_ms=1500
    )
    wait_for(lambda: prefill.metric("kvsieve_peer_waiting_offers"))
    prefill.engine.abort(prefill.engine.start(ids, 1, do_remote_decode=True))
    assert decode.engine.answer(waiting)["tokens"] == plain.ask(ids)["tokens"]
    decode.settled()
    prefill.settled()


def test_what_requests_have_in_common_is_pulled_once(hosts: Hosts, plain: Engine) -> None:
    prefill, decode = hosts
    common = new_prompt(20 * BLOCK)
    prompts = [common + new_prompt(3 * BLOCK) for _ in range(3)]
    pulled = decode.metric("kvsieve_peer_pulled_blocks_total")
    computed = decode.engine.computed
    waiting = [
        decode.engine.start(
            ids, do_remote_prefill=True, kvsieve_store=prefill.address, kvsieve_wait_ms=60_000
        )
        for ids in prompts
    ]
    for ids in prompts:
        prefilled(prefill, ids)
    for request, ids in zip(waiting, prompts, strict=True):
        assert decode.engine.answer(request)["tokens"] == plain.ask(ids)["tokens"]
    assert decode.metric("kvsieve_peer_pulled_blocks_total") == pulled + 20 + 3 * 3
    assert decode.engine.computed == computed + 3
    decode.settled()
    prefill.settled()


@pytest.mark.parametrize(
    "params",
    [
        {"kvsieve_store": "127.0.0.1:1"},
        {"kvsieve_store": "nonsense"},
        {"kvsieve_store": 7},
        {"kvsieve_store": "{prefill}", "kvsieve_wait_ms": "long"},
    ],
)
def test_a_hand_off_that_can_not_be_is_computed(hosts: Hosts, plain: Engine, params: dict[str, Any]) -> None:
    prefill, decode = hosts
    if params["kvsieve_store"] == "{prefill}":
        params = params | {"kvsieve_store": prefill.address}
    ids = new_prompt(200)
    computed = decode.engine.computed
    assert decode.engine.ask(ids, do_remote_prefill=True, **params)["tokens"] == plain.ask(ids)["tokens"]
    assert decode.engine.computed == computed + 200
    decode.settled()
