"""Failures, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from typing import Any


class ProxyError(Exception):
    """A request that fails. status: of HTTP. kind: the `type` that OpenAI's clients see."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}

    def event(self) -> bytes:
        """As the last event of a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


class BadRequest(ProxyError):
    def __init__(self, message: str) -> None:
        super().__init__(400, "invalid_request_error", message)


class NoInstance(ProxyError):
    """Nobody is left to ask."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "service_unavailable", message)


class UpstreamFailed(ProxyError):
    """An engine did not answer, or not in full. What another engine says may be better."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(
            504 if timed_out else 502, "upstream_timeout" if timed_out else "upstream_error", message
        )
