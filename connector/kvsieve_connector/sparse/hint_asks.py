"""What the scheduler half asks the store for hints, beside the requests: none waits for an answer."""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvsieve_connector.sparse.hosts import Host
    from kvsieve_store.client import Match, StoreClient


class FoundHint(NamedTuple):
    """A request's hint, leased. tokens: its positions below this count."""

    host: Host
    tokens: int
    match: Match


@dataclass(slots=True)
class _Ask:
    host: Host
    key: bytes
    tokens: int
    answer: Future[Match] | None = None


class HintAsks:
    """Polled once a step."""

    def __init__(self) -> None:
        self._asks: list[_Ask] = []

    def __bool__(self) -> bool:
        """Whether an answer is due: it may bring a lease, to be given back."""
        return any(ask.answer is not None for ask in self._asks)

    def add(self, host: Host, key: bytes, tokens: int) -> None:
        """The request begins with `tokens` tokens of the store, whose hint, if there is one, has this key."""
        self._asks.append(_Ask(host, key, tokens))

    def poll(self, client: StoreClient | None, on_their_way: Container[bytes]) -> list[FoundHint]:
        """Asks for what is not on its way to the store any more; returns what was found since the last
        call."""
        found, waiting = [], []
        for ask in self._asks:
            if ask.answer is None:
                if client is None or ask.host.ended:
                    continue
                if ask.key not in on_their_way:
                    ask.answer = client.match_async([ask.key])
                waiting.append(ask)
            elif not ask.answer.done():
                waiting.append(ask)
            elif not ask.answer.cancelled() and not ask.answer.exception() and ask.answer.result().refs:
                found.append(FoundHint(ask.host, ask.tokens, ask.answer.result()))
        self._asks = waiting
        return found
