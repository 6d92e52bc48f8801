"""What either engine is asked, out of what the client asked. Pure functions of JSON objects."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

PARAMS = "kv_transfer_params"

_DECODE_ONLY = ("stream_options", "min_tokens", "n", "best_of", "use_beam_search")
"""Fields that a prefill request must not have: one token, one sequence, one answer."""


def prefill_body(body: Body) -> Body:
    """One token, not streamed, and the KV stays for somebody else to take."""
    asked = {name: value for name, value in body.items() if name not in _DECODE_ONLY}
    asked |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked | {PARAMS: {"do_remote_decode": True, "do_remote_prefill": False}}


def decode_body(body: Body, answer: Body) -> Body:
    """After prefill: what its answer says about the transfer goes along as it is."""
    params = answer.get(PARAMS)
    if not isinstance(params, dict) or not params:
        return body
    if several_prompts(body):
        # The number is that of the first prompt.
        params = {name: value for name, value in params.items() if name != "kvsieve_tokens"}
    return body | {PARAMS: params}


def overlapped_body(body: Body, store: str, wait_ms: int) -> Body:
    """Beside prefill: where the blocks will be, and how long to wait for the next one."""
    params = {"do_remote_prefill": True, "do_remote_decode": False}
    return body | {PARAMS: params | {"kvsieve_store": store, "kvsieve_wait_ms": wait_ms}}


def store_of(answer: Body) -> str:
    """Address of the store that a prefill answer names; "" if it names none."""
    params = answer.get(PARAMS)
    store = params.get("kvsieve_store") if isinstance(params, dict) else None
    return store if isinstance(store, str) else ""


def prompt_length(body: Body) -> int:
    """Characters, or token ids, of all that the model reads."""
    if isinstance(messages := body.get("messages"), list):
        return sum(_length(message.get("content")) for message in messages if isinstance(message, dict))
    return _length(body.get("prompt"))


def several_prompts(body: Body) -> bool:
    """Whether a completion request has more than one prompt."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return _length(value.get("text"))
    if isinstance(value, list):
        return sum(1 if isinstance(item, int) else _length(item) for item in value)
    return 0
