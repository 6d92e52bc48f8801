"""Requests to engines and proxies, and what comes back."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from tests.engine.generate import prompt
from tests.two_hosts.cluster import MODEL

TOKENS = 8


@dataclass(frozen=True)
class Reply:
    """tokens: generated ids. error: what the client is told when it fails, in OpenAI's form; {} when not."""

    status: int
    tokens: tuple[int, ...] = ()
    error: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


def request(seed: int, length: int = 3_000, **more: Any) -> dict[str, Any]:
    """Greedy; a prompt that no other seed shares a block with."""
    ids = [seed + 2, *prompt(length - 1, seed)]
    body = {"model": MODEL, "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | more


def ask(url: str, body: dict[str, Any], timeout: float = 90) -> Reply:
    """A completion. Raises OSError when the connection breaks without an answer."""
    call = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(call, timeout=timeout) as answer:
            if body.get("stream"):
                return _stream(answer)
            page = json.load(answer)
            choice = page["choices"][0]
            params = page.get("kv_transfer_params") or {}
            return Reply(200, tuple(choice["token_ids"]), params=params)
    except urllib.error.HTTPError as error:
        return Reply(error.code, error=json.load(error)["error"])
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def _stream(answer: Any) -> Reply:
    tokens: list[int] = []
    done = False
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        text = line.removeprefix(b"data: ").strip()
        if text == b"[DONE]":
            done = True
            break
        event = json.loads(text)
        if "error" in event:
            return Reply(200, tuple(tokens), error=event["error"])
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
    assert done, "the stream ended without [DONE] and without an error"
    return Reply(200, tuple(tokens))
