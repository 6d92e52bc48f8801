"""What the proxy is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Flow = Literal["sequential", "overlapped"]
Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Address:
    """An engine. url: without a path. store: address of its store for other stores, host:port, if known."""

    url: str
    store: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """URL, or URL=HOST:PORT with the store's address. Raises ValueError."""
        url, _, store = text.strip().partition("=")
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
        ):
            raise ValueError(f"{text!r} given, http://host:port or http://host:port=store-host:port expected")
        if port is None and ":" in parts.netloc.rpartition("]")[2]:
            raise ValueError(f"{text!r} given: its port is not a number from 0 to 65535")
        if store and not store.rpartition(":")[2].isdigit():
            raise ValueError(f"{text!r} given: host:port expected as the store's address, after the =")
        return cls(f"{parts.scheme}://{parts.netloc}", store)


@dataclass(frozen=True)
class ProxySettings:
    """Times in seconds, sizes in bytes.

    flow: sequential: decode is asked when prefill has answered. overlapped: at once, where the address of the
        prefill engine's store is known; it is learnt from that engine's first answer, if not given.
    wait_ms: overlapped: how long decode waits without progress before it computes the rest itself.
    short_prompt: prompts of fewer characters (or token ids) go to decode alone.
    prefill_timeout: for prefill's answer. first_byte_timeout: for decode's first byte, or its whole answer
        when it is not streamed. idle_timeout: between two pieces of a stream, and for a client to take one.
    health_interval: between two checks of an engine. fails: failures in a row that take one out.
    attempts: engines that a request is tried on, each of prefill and decode.
    max_requests: at a time. drain_timeout: for requests under way when the proxy is told to end.
    """

    prefill: tuple[Address, ...]
    decode: tuple[Address, ...]
    listen: str = "127.0.0.1:8000"
    flow: Flow = "overlapped"
    wait_ms: int = 10_000
    short_prompt: int = 0
    max_body: int = 32 << 20
    max_requests: int = 1_024
    attempts: int = 3
    connect_timeout: float = 2.0
    prefill_timeout: float = 300.0
    first_byte_timeout: float = 600.0
    idle_timeout: float = 60.0
    health_interval: float = 2.0
    health_timeout: float = 2.0
    fails: int = 2
    drain_timeout: float = 30.0
    host: str = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError, which names the setting, what was given, and what is allowed."""
        if not self.decode:
            raise ValueError("decode: none given, at least one engine required")
        for role, pool in (("prefill", self.prefill), ("decode", self.decode)):
            urls = [address.url for address in pool]
            if len(set(urls)) < len(urls):
                raise ValueError(f"{role}: an engine is given twice: {', '.join(urls)}")
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65_535:
            raise ValueError(f"listen: {self.listen!r} given, host:port expected")
        object.__setattr__(self, "host", host.strip("[]") or "127.0.0.1")
        object.__setattr__(self, "port", int(port))
        if self.flow not in ("sequential", "overlapped"):
            raise ValueError(f"flow: {self.flow!r} given, sequential or overlapped expected")
        for name in ("max_body", "max_requests", "attempts", "fails", "wait_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 required")
        for name in (f for f in vars(self) if f.endswith(("_timeout", "_interval"))):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} given, more than 0 seconds required")
