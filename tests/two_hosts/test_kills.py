"""kill -9 of either store or engine at each step of a hand-off: the right answer, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.upstreams import wait_for
from tests.two_hosts.asking import Reply, ask, request
from tests.two_hosts.cluster import Cluster, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FLOWS = ("sequential", "overlapped")
GENERATED = "vllm:generation_tokens_total"
STEPS = ("before", "prefill", "between", "transfer", "decode")
"""When the kill comes: before the request; prefill has sealed some; it has answered, decode is not asked yet;
blocks are on their way; decode has sent its first token."""

Proxied = Callable[..., Any]


def kill(pd: Cluster, victim: str) -> None:
    side = pd.prefill if victim.startswith("prefill") else pd.decode
    side.store.kill() if victim.endswith("store") else side.engine.kill()


def play(pd: Cluster, proxied: Proxied, victim: str, step: str, flow: str, body: dict[str, Any]) -> Reply:
    """The client's answer to a request during which the victim is killed."""
    if step == "between":
        params = ask(
            pd.prefill.engine.url, body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        ).params
        assert params["kvsieve_store"] == pd.prefill.address
        kill(pd, victim)
        # A proxy that is not asked for prefill any more.
        return ask(proxied(flow).url, body | {"kv_transfer_params": params})
    proxy = proxied(flow)
    if step == "before":
        kill(pd, victim)
        return ask(proxy.url, body)
    if step == "decode":
        body = body | {"stream": True, "max_tokens": 400}
    else:
        pd.net.slow(80)
    transfers, sealed = pd.transfers(), pd.prefill.sealed()
    tokens = pd.decode.engine.counter(GENERATED)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, proxy.url, body)
        if step == "prefill":
            wait_for(lambda: pd.prefill.sealed() > sealed + 3)
        elif step == "transfer":
            wait_for(transfers)
        else:
            wait_for(lambda: pd.decode.engine.counter(GENERATED) > tokens)
        kill(pd, victim)
        return answer.result()


def flow_of(step: str, other: bool = False) -> str:
    """Both flows get their share of the steps."""
    return FLOWS[(STEPS.index(step) + other) % 2]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", ["prefill store", "decode store"])
def test_a_store_is_killed(
    victim: str, step: str, pd: Cluster, proxied: Proxied, plain_engine: Engine
) -> None:
    """No request is lost with a store."""
    of_decode = victim.startswith("decode")
    body = request(200 + 2 * STEPS.index(step) + of_decode, 4_000)
    answer = play(pd, proxied, victim, step, flow_of(step, of_decode), body)
    if step == "decode":
        body |= {"max_tokens": 400}
    assert answer == Reply(200, ask(plain_engine.url, body).tokens)


@pytest.mark.parametrize("step", STEPS[:-1])
def test_the_prefill_engine_is_killed(step: str, pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    """Its store has what it has sealed; decode computes the rest."""
    flow = flow_of(step)
    body = request(300 + STEPS.index(step), 4_000)
    assert play(pd, proxied, "prefill engine", step, flow, body) == Reply(
        200, ask(plain_engine.url, body).tokens
    )


@pytest.mark.parametrize("step", STEPS)
def test_the_decode_engine_is_killed(step: str, pd: Cluster, proxied: Proxied, plain_engine: Engine) -> None:
    """The request fails, since there is no other one, and says so; the next one is right."""
    flow = flow_of(step)
    body = request(310 + STEPS.index(step), 4_000)
    answer = play(pd, proxied, "decode engine", step, flow, body)
    if step == "decode":
        assert answer.status == 200
        assert 0 < len(answer.tokens) < 400
        assert "broke off its answer" in answer.error["message"]
    else:
        assert answer.status in (502, 503)
        assert answer.error["type"] in ("upstream_error", "service_unavailable")
    pd.mend()
    assert ask(proxied(flow).url, body) == Reply(200, ask(plain_engine.url, body).tokens)


@pytest.mark.timeout(180)
def test_in_the_end_nothing_is_left(pd: Cluster) -> None:
    """Offers that could not be taken back, as the link or a store was gone, run out after two minutes."""
    pd.nothing_leaks(130, offers=True)
