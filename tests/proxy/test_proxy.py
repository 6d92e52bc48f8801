"""The proxy as a process, before upstreams that fail in every way an engine can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvsieve_pd.proxy.app import Proxy
from kvsieve_pd.proxy.settings import Address, ProxySettings
from tests.conftest import free_port
from tests.proxy.upstreams import STORE, ProxyPages, ProxyProcess, Upstream, serving, wait_for

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "kvsieve_store": STORE,
    "kvsieve_tokens": 96,
    "remote_engine_id": "somebody-else's",
    "remote_block_ids": [[1, 2], [3]],
}
QUICK = {"health_interval": 0.1, "connect_timeout": 1.0, "health_timeout": 1.0}
REQUEST = {"model": "m", "prompt": "once upon a time", "max_tokens": 20, "temperature": 0}


@pytest.fixture
def upstream() -> Iterator[Callable[..., Upstream]]:
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(Upstream(**how).running())


@pytest.fixture
def proxy() -> Iterator[Callable[..., ProxyPages]]:
    """proxy([prefill], [decode], **settings) -> a proxy that serves. store: of the prefill engines."""
    with contextlib.ExitStack() as stack:

        def start(
            prefill: list[Upstream], decode: list[Upstream], store: str = "", **settings: Any
        ) -> ProxyPages:
            engines = (tuple(Address(u.url, store) for u in prefill), tuple(Address(u.url) for u in decode))
            pages = ProxyPages()
            pages.url = f"http://127.0.0.1:{(port := free_port())}"
            stack.enter_context(serving(lambda: Proxy(ProxySettings(*engines, **QUICK | settings)).app, port))
            return pages

        yield start


async def post(
    url: str, body: Any = REQUEST, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    """Status, body (JSON, or the events of a stream) and headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=data, headers={"Content-Type": "application/json"} | headers) as answer,
    ):
        text = await answer.text()
        if answer.headers["Content-Type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            return answer.status, [e if e == "[DONE]" else json.loads(e) for e in events], answer.headers
        return answer.status, json.loads(text), answer.headers


async def test_prefill_comes_first_and_its_params_go_on_untouched(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    body = REQUEST | {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "n": 2}
    status, events, _ = await post(proxy([prefill], [decode]).url, body)
    assert status == 200
    assert events[-1] == "[DONE]"
    assert len(events) == 5
    (first,), (second,) = prefill.seen, decode.seen
    assert first.body == REQUEST | {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert second.body == body | {"kv_transfer_params": PARAMS}


async def test_chat_asks_prefill_for_one_token_by_both_names(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 9, "tools": [{"a": 1}], "x": 1}
    status, _, _ = await post(proxy([prefill], [decode]).url, body, "/v1/chat/completions")
    assert status == 200
    asked = prefill.seen[0]
    assert asked.path == decode.seen[0].path == "/v1/chat/completions"
    assert (asked.body["max_tokens"], asked.body["max_completion_tokens"]) == (1, 1)
    assert (asked.body["messages"], asked.body["tools"], asked.body["x"]) == (messages, [{"a": 1}], 1)
    assert decode.seen[0].body["max_completion_tokens"] == 9


async def test_decode_is_asked_at_once_where_the_store_is_known(upstream: Any, proxy: Any) -> None:
    """The answer is there though prefill has not answered; prefill is told to stop."""
    prefill, decode = upstream(delay=30), upstream(delay=0.5)
    running = proxy([prefill], [decode], wait_ms=700, store=STORE)
    status, _, _ = await post(running.url)
    assert status == 200
    assert decode.seen[0].body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvsieve_store": STORE,
        "kvsieve_wait_ms": 700,
    }
    wait_for(lambda: prefill.seen[0].ended == "cancelled")


async def test_the_store_is_learnt_from_the_first_answer(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    running = proxy([prefill], [decode])
    for _ in range(2):
        assert (await post(running.url))[0] == 200
    sent = [seen.body["kv_transfer_params"] for seen in decode.seen]
    assert "kvsieve_wait_ms" not in sent[0]
    assert sent[1]["kvsieve_wait_ms"] == 10_000
    assert running.health()["prefill"][0]["store"] == STORE
    assert running.metric("requests_total", flow="sequential", outcome="ok") == 1
    assert running.metric("requests_total", flow="overlapped", outcome="ok") == 1


@pytest.mark.parametrize("own", [{"do_remote_decode": True}, {"do_remote_prefill": True, "foreign": [1]}])
async def test_behind_another_proxy_it_passes_its_params_on(own: Any, upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    running = proxy([prefill], [decode])
    status, answer, _ = await post(running.url, REQUEST | {"kv_transfer_params": own})
    assert status == 200
    asked, other = (prefill, decode) if "do_remote_decode" in own else (decode, prefill)
    assert asked.seen[0].body == REQUEST | {"kv_transfer_params": own}
    assert not other.seen
    assert answer["kv_transfer_params"] == asked.params


async def test_short_prompts_go_to_decode_alone(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    running = proxy([prefill], [decode], short_prompt=50)
    await post(running.url)
    await post(running.url, REQUEST | {"prompt": list(range(49))})
    assert not prefill.seen
    await post(running.url, REQUEST | {"prompt": list(range(50))})
    assert len(prefill.seen) == 1


async def test_several_prompts_go_without_the_length_of_the_first(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    await post(proxy([prefill], [decode]).url, REQUEST | {"prompt": ["one", "two"]})
    sent = decode.seen[0].body["kv_transfer_params"]
    assert sent == {name: value for name, value in PARAMS.items() if name != "kvsieve_tokens"}


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 503}, {"stop_after": 5}, {"healthy": False}])
@pytest.mark.parametrize("store", ["", STORE])
async def test_without_prefill_decode_computes(how: Any, store: str, upstream: Any, proxy: Any) -> None:
    # Decode takes its time, so that prefill fails before it is told to stop.
    prefill, decode = upstream(**how), upstream(delay=0.2)
    running = proxy([prefill], [decode], store=store)
    wait_for(lambda: how.get("healthy", True) or not running.health()["prefill"][0]["up"])
    for _ in range(3):
        assert (await post(running.url))[0] == 200
    assert running.health()["status"] in ("ok", "degraded")
    assert running.metric("without_prefill_total") > 0


async def test_decode_is_asked_anew_when_prefill_fails_beside_it(upstream: Any, proxy: Any) -> None:
    """With another prefill engine; and for what there is, without waiting, when there is none."""
    bad, good, decode = upstream(status=500), upstream(params=PARAMS), upstream(delay=0.5)
    running = proxy([bad, good], [decode], store=STORE, fails=100)
    assert (await post(running.url))[0] == 200
    assert (len(bad.seen), len(good.seen)) == (1, 1)
    assert [seen.ended for seen in decode.seen] == ["cancelled", "answered"]
    assert running.metric("retries_total", role="prefill") == 1
    good.status = 500
    decode.seen.clear()
    assert (await post(running.url))[0] == 200
    waits = [seen.body["kv_transfer_params"]["kvsieve_wait_ms"] for seen in decode.seen]
    assert waits == [10_000, 10_000, 0]
    assert running.metric("without_prefill_total") == 1
    assert running.metric("instance_failures_total", role="decode") == 0


async def test_prefills_refusal_is_the_answer(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(status=400), upstream()
    running = proxy([prefill], [decode])
    status, answer, _ = await post(running.url)
    assert (status, answer["error"]["message"]) == (400, "no")
    assert not decode.seen
    assert running.metric("instance_failures_total") == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", [{"status": 503}, {"stop_after": 0}, {"stop_after": 5}])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_engine_is_tried_before_the_first_byte(
    role: str, how: Any, stream: bool, upstream: Any, proxy: Any
) -> None:
    if stream and role == "decode" and how == {"stop_after": 5}:
        pytest.skip("a stream has begun by then")
    bad, good, other = upstream(**how), upstream(params=PARAMS), upstream(params=PARAMS)
    pools = ([bad, good], [other]) if role == "prefill" else ([other], [bad, good])
    running = proxy(*pools, flow="sequential")
    for _ in range(4):
        status, answer, _ = await post(running.url, REQUEST | {"stream": stream})
        assert status == 200
        assert not stream or answer[-1] == "[DONE]"
    assert len(good.seen) == 4
    assert running.metric("retries_total", role=role) >= 1


async def test_an_engine_that_is_not_there_is_left_out_until_it_is(upstream: Any, proxy: Any) -> None:
    late, good = Upstream(), upstream()
    running = proxy([], [late, good])
    wait_for(lambda: not running.health()["decode"][0]["up"])
    assert running.metric("instance_up", role="decode") == 1
    for _ in range(3):
        assert (await post(running.url))[0] == 200
    assert running.metric("retries_total") == 0
    with late.running():
        wait_for(lambda: running.health()["decode"][0]["up"])
        for _ in range(2):
            assert (await post(running.url))[0] == 200
        assert len(late.seen) == 1


async def test_requests_go_to_the_engine_with_the_fewest(upstream: Any, proxy: Any) -> None:
    slow, quick = upstream(delay=1), upstream()
    running = proxy([], [slow, quick])
    waiting = asyncio.create_task(post(running.url))
    await asyncio.to_thread(wait_for, lambda: bool(slow.seen))
    for _ in range(3):
        await post(running.url)
    assert (len(slow.seen), len(quick.seen)) == (1, 3)
    assert (await waiting)[0] == 200


async def test_no_decode_engine_is_an_error_that_says_so(upstream: Any, proxy: Any) -> None:
    decode = upstream(healthy=False)
    running = proxy([], [decode])
    wait_for(lambda: running.health()["status"] == "down")
    status, answer, headers = await post(running.url)
    assert status == 503
    assert answer["error"]["message"] == "no decode engine is available: 0 of 1 are up"
    assert answer["error"]["type"] == "service_unavailable"
    assert headers["Retry-After"] == "1"


async def test_all_engines_failing_is_an_error_that_names_the_last(upstream: Any, proxy: Any) -> None:
    one, two = upstream(status=500), upstream(status=500)
    status, answer, _ = await post(proxy([], [one, two]).url)
    assert status == 502
    assert answer["error"]["type"] == "upstream_error"
    assert any(f"{u.url} answered 500" in answer["error"]["message"] for u in (one, two))


async def test_a_stream_that_breaks_ends_with_an_error_event(upstream: Any, proxy: Any) -> None:
    decode = upstream(stop_after=2, pause=0.1)
    running = proxy([], [decode])
    status, events, _ = await post(running.url, REQUEST | {"stream": True})
    assert status == 200
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["0", "1"]
    assert "broke off its answer" in events[-1]["error"]["message"]
    assert running.metric("requests_total", outcome="broken") == 1
    assert running.metric("instance_failures_total", role="decode") == 1


async def test_a_stream_that_stalls_ends_with_an_error_event(upstream: Any, proxy: Any) -> None:
    decode = upstream(pause=30)
    running = proxy([], [decode], idle_timeout=0.5)
    _, events, _ = await post(running.url, REQUEST | {"stream": True})
    assert events[-1]["error"]["type"] == "upstream_timeout"
    wait_for(lambda: decode.seen[0].ended == "cancelled")


async def test_an_answer_that_does_not_come_is_a_timeout(upstream: Any, proxy: Any) -> None:
    decode, other = upstream(delay=30), upstream(delay=30)
    running = proxy([], [decode, other], first_byte_timeout=0.5)
    status, answer, _ = await post(running.url)
    assert status == 504
    assert "did not answer within 0.5 s" in answer["error"]["message"]
    assert len(decode.seen) + len(other.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_both_sides(stream: bool, upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(delay=30), upstream(**({"pause": 30} if stream else {"delay": 30}))
    running = proxy([prefill], [decode], store=STORE)
    request = json.dumps(REQUEST | {"stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n"
        client.sendall(head.encode() + request)
        if stream:
            assert client.recv(1000)
        wait_for(lambda: bool(prefill.seen and decode.seen))
    wait_for(lambda: prefill.seen[0].ended == decode.seen[0].ended == "cancelled")
    wait_for(lambda: running.metric("requests_total", outcome="disconnected") == 1)
    assert running.metric("requests_under_way") == 0
    assert running.metric("instance_requests") == 0
    assert running.metric("instance_failures_total") == 0


async def test_a_client_that_reads_nothing_is_dropped(upstream: Any, proxy: Any) -> None:
    decode = upstream(pieces=2_000_000)
    running = proxy([], [decode], idle_timeout=1)
    request = json.dumps(REQUEST | {"stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n"
        client.sendall(head.encode() + request)
        wait_for(lambda: bool(decode.seen) and decode.seen[0].ended == "cancelled", 60)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "an object expected"),
        (b"[" * 1_900, 400, "not JSON"),
        (b'"' + b"x" * 3000 + b'"', 413, "longer than 2,000 bytes"),
    ],
)
async def test_bad_bodies(body: bytes, status: int, says: str, upstream: Any, proxy: Any) -> None:
    decode = upstream()
    running = proxy([], [decode], max_body=2000)
    got, answer, _ = await post(running.url, body)
    assert got == status
    assert says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert not decode.seen


async def test_too_many_requests(upstream: Any, proxy: Any) -> None:
    decode = upstream(delay=30)
    running = proxy([], [decode], max_requests=1)
    held = threading.Thread(target=running.get, args=("/health",))
    held.start()
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        wait_for(lambda: bool(decode.seen))
        status, answer, headers = await post(running.url)
    held.join()
    assert (status, answer["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")


async def test_unknown_paths_and_methods(upstream: Any, proxy: Any) -> None:
    running = proxy([], [upstream()])
    assert (await post(running.url, path="/v1/nothing"))[:2] == (
        404,
        {
            "error": {
                "message": "POST /v1/nothing: Not Found",
                "type": "invalid_request_error",
                "param": None,
                "code": 404,
            }
        },
    )
    assert (await post(running.url, path="/v1/models"))[0] == 405
    assert json.loads(running.get("/v1/models"))["data"] == [{"id": "m"}]


async def test_both_engines_get_the_clients_headers(upstream: Any, proxy: Any) -> None:
    prefill, decode = upstream(params=PARAMS), upstream()
    running = proxy([prefill], [decode])
    status, answer, headers = await post(
        running.url, Authorization="Bearer k", X_Request_Id="r1", Connection="x-own", X_Own="1"
    )
    assert status == 200, answer
    assert headers["X-Request-Id"] == "r1"
    for seen in (prefill.seen[0], decode.seen[0]):
        assert (seen.headers["Authorization"], seen.headers["X-Request-Id"]) == ("Bearer k", "r1")
        assert "X-Own" not in seen.headers
    await post(running.url)
    given = [u.seen[1].headers["X-Request-Id"] for u in (prefill, decode)]
    assert given[0] == given[1]


def test_settings_from_the_environment(upstream: Any, tmp_path: Path) -> None:
    one, two = upstream(), upstream()
    environ = {"KVSIEVE_PROXY_DECODE": f"{one.url} {two.url}", "KVSIEVE_PROXY_PREFILL": f"{one.url}={STORE}"}
    running = ProxyProcess(tmp_path, **environ)
    try:
        page = running.health()
        assert [engine["url"] for engine in page["decode"]] == [one.url, two.url]
        assert page["prefill"][0]["store"] == STORE
    finally:
        running.close()
