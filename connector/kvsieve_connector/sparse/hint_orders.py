"""The scheduler half's part in hints: those that requests which begin find, and those that requests which end
leave."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsieve_connector.metadata import HintLoad, HintSave
from kvsieve_connector.requests import SaveJob
from kvsieve_connector.sparse.hints import hint_key

if TYPE_CHECKING:
    from kvsieve_connector.blocks import Blocks
    from kvsieve_connector.saves import Saves
    from kvsieve_connector.sparse.hosts import Host, Hosts
    from kvsieve_connector.sparse.releases import Releases
    from kvsieve_store.client import Match, StoreClient


@dataclass(slots=True)
class _Ask:
    """tokens: the request begins with so many of the store, whose hint, if there is one, has the key."""

    host: Host
    key: bytes
    tokens: int
    answer: Future[Match] | None = None


class HintOrders:
    """Polled once a step; no request waits for an answer."""

    def __init__(self, blocks: Blocks, saves: Saves, hosts: Hosts, releases: Releases) -> None:
        """Of the scheduler half. releases: gets the leases of hints that were found."""
        self._blocks, self._saves, self._hosts, self._releases = blocks, saves, hosts, releases
        self._asks: list[_Ask] = []

    def __bool__(self) -> bool:
        """Whether an answer is due: it may bring a lease, to be given back."""
        return any(ask.answer is not None for ask in self._asks)

    def ask(self, host: Host, blocks: int) -> None:
        """The request begins with so many blocks of the store."""
        key = hint_key(self._blocks.key(host.request, blocks - 1))
        self._asks.append(_Ask(host, key, blocks * self._blocks.tokens))

    def saves(self, ended: Iterable[Host], client: StoreClient, epoch: int) -> list[HintSave]:
        """A hint of each request that ended, as far as there is a slot that no other may need."""
        orders = []
        for host in ended:
            if not host.hints or host.missing or host.epochs != {epoch}:
                continue
            parent = self._blocks.key(host.request, host.known - 1)
            key = hint_key(parent)
            if key in self._saves or client.credits <= self._hosts.owed:
                continue
            for ref in client.take_credits(1, epoch=epoch):
                number = self._saves.begin(SaveJob(key, parent, ref, None))
                orders.append(HintSave(number, ref.slot, host.request.request_id))
        return orders

    def loads(self, client: StoreClient | None, epoch: int) -> list[HintLoad]:
        """Of what was found since the last call; leases last until the workers have read it."""
        orders = []
        for ask, match in self._found(client):
            self._releases.add([(match.epoch, lease) for lease in match.lease_ids], ())
            if match.epoch == epoch and not ask.host.ended:
                request_id = ask.host.request.request_id
                orders.append(HintLoad(request_id, match.epoch, match.refs[0], ask.tokens))
        return orders

    def _found(self, client: StoreClient | None) -> list[tuple[_Ask, Match]]:
        """Asks for what is not on its way to the store any more."""
        found, waiting = [], []
        for ask in self._asks:
            if ask.answer is None:
                if client is None or ask.host.ended:
                    continue
                if ask.key not in self._saves:
                    ask.answer = client.match_async([ask.key])
                waiting.append(ask)
            elif not ask.answer.done():
                waiting.append(ask)
            elif not ask.answer.cancelled() and not ask.answer.exception() and ask.answer.result().refs:
                found.append((ask, ask.answer.result()))
        self._asks = waiting
        return found
