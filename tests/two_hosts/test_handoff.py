"""A prompt prefilled on one host decodes on another; on a link that is whole, cut, narrow, or bad."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.upstreams import wait_for
from tests.two_hosts.asking import Reply, ask, request
from tests.two_hosts.cluster import BLOCK, Cluster, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FLOWS = ("sequential", "overlapped")
HITS = "vllm:external_prefix_cache_hits_total"
PULLED = "vllm:kvsieve_pulled_blocks_total"
Proxied = Callable[..., Any]


def expected(plain_engine: Engine, body: dict[str, Any]) -> Reply:
    return Reply(200, ask(plain_engine.url, body).tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("flow", FLOWS)
def test_the_answer_is_that_of_a_single_engine(
    flow: str, stream: bool, pd: Cluster, proxied: Proxied, plain_engine: Engine
) -> None:
    """And decode computes no full block of the prompt but the last, which the engine wants a token of."""
    body = request(FLOWS.index(flow) * 2 + stream, stream=stream)
    engine = pd.decode.engine
    hits, pulled = engine.counter(HITS), engine.counter(PULLED)
    assert ask(proxied(flow).url, body) == expected(plain_engine, body)
    blocks = (len(body["prompt"]) - 1) // BLOCK
    wait_for(lambda: engine.counter(HITS) - hits >= blocks * BLOCK)
    assert engine.counter(PULLED) - pulled >= blocks
    assert pd.prefill.engine.counter("vllm:kvsieve_handoffs_out_total") > 0


def test_a_proxy_that_knows_only_vllms_own_fields(pd: Cluster, plain_engine: Engine) -> None:
    """What vLLM's own example proxy does: the prefill answer's params go into the decode request, unread."""
    body = request(10)
    first = body | {"max_tokens": 1, "stream": False}
    first["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    hits = pd.decode.engine.counter(HITS)
    params = ask(pd.prefill.engine.url, first).params
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["kvsieve_store"] == pd.prefill.address
    answer = ask(pd.decode.engine.url, body | {"kv_transfer_params": params})
    assert answer.tokens == expected(plain_engine, body).tokens
    wait_for(lambda: pd.decode.engine.counter(HITS) - hits >= (len(body["prompt"]) - 1) // BLOCK * BLOCK)


def test_the_proxy_behind_such_a_proxy(pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    """Both of its engines are this one: params pass through it untouched, either way."""
    body = request(11)
    proxy = proxied("overlapped")
    params = ask(proxy.url, body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}).params
    assert params["kvsieve_store"] == pd.prefill.address
    answer = ask(proxy.url, body | {"kv_transfer_params": params})
    assert answer.tokens == expected(plain_engine, body).tokens


@pytest.mark.parametrize("flow", FLOWS)
def test_many_at_a_time(flow: str, pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    bodies = [request(20 + 10 * FLOWS.index(flow) + n, 400 + 150 * n, stream=n % 2 == 0) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: ask(proxied(flow).url, body), bodies))
    assert answers == [expected(plain_engine, body) for body in bodies]


@pytest.mark.parametrize("flow", FLOWS)
def test_clients_that_go_away_leave_nothing(flow: str, pd: Cluster, proxied: Proxied) -> None:
    """At any moment; `pd` looks at the stores afterwards."""
    proxy = proxied(flow)
    for n, patience in enumerate((0.05, 0.3, 0.8, 1.5)):
        with pytest.raises(OSError, match="timed out"):
            ask(
                proxy.url, request(40 + 10 * FLOWS.index(flow) + n, 4_000, max_tokens=2_000), timeout=patience
            )
    wait_for(lambda: proxy.metric("requests_under_way") == 0)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("when", ["before", "during"])
def test_the_link_is_cut(when: str, flow: str, pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    """Decode computes what has not come."""
    body = request(60 + 2 * FLOWS.index(flow) + (when == "during"), 4_000)
    proxy = proxied(flow)
    if when == "before":
        pd.net.cut()
        assert ask(proxy.url, body) == expected(plain_engine, body)
        return
    pd.net.slow(20)
    transfers = pd.transfers()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, proxy.url, body)
        wait_for(transfers)
        pd.net.cut()
        assert answer.result() == expected(plain_engine, body)
    assert pd.decode.engine.counter("vllm:kvsieve_incomplete_handoffs_total") > 0


@pytest.mark.parametrize("flow", FLOWS)
def test_a_cut_that_is_mended_costs_time_only(
    flow: str, pd: Cluster, proxied: Proxied, plain_engine: Engine
) -> None:
    body = request(70 + FLOWS.index(flow), 4_000)
    pd.net.slow(20)
    transfers = pd.transfers()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, proxied(flow).url, body)
        wait_for(transfers)
        pd.net.cut()
        wait_for(lambda: not answer.done(), 1)
        pd.net.mend()
        assert answer.result() == expected(plain_engine, body)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_narrow_link_that_drops_packets(
    flow: str, pd: Cluster, proxied: Proxied, plain_engine: Engine
) -> None:
    """More is sent than fits: up to 50 ms of queue, and losses."""
    body = request(80 + FLOWS.index(flow), 4_000)
    pd.net.slow(50)
    assert ask(proxied(flow).url, body) == expected(plain_engine, body)


@pytest.mark.parametrize("flow", FLOWS)
def test_delay_and_loss(flow: str, pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    body = request(90 + FLOWS.index(flow))
    try:
        pd.net.bad()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no netem in this kernel: {error.stderr.strip()}")
    assert ask(proxied(flow).url, body) == expected(plain_engine, body)
