"""The engines of one role: who is alive, and whose turn it is. No I/O, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvsieve_pd.proxy.errors import NoInstance
from kvsieve_pd.proxy.metrics import Metrics
from kvsieve_pd.proxy.settings import Address, Role


@dataclass(eq=False)
class Instance:
    """One engine.

    store: host:port of its store, as other stores reach it; "" until it is known.
    failures, missed: requests and checks that failed, in a row. outstanding: requests under way.
    turn: when it was last chosen.
    """

    url: str
    store: str
    up: bool = True
    failures: int = 0
    missed: int = 0
    outstanding: int = 0
    turn: int = 0


class Pool:
    """All engines of a role. Every one counts as up until it has failed."""

    def __init__(self, role: Role, addresses: Iterable[Address], fails: int, metrics: Metrics) -> None:
        """fails: failures in a row that take an engine out."""
        self.role = role
        self.instances = [Instance(address.url, address.store) for address in addresses]
        self._fails = fails
        self._metrics = metrics
        self._turns = itertools.count(1)
        for instance in self.instances:
            self._show(instance)

    @property
    def up(self) -> list[Instance]:
        return [instance for instance in self.instances if instance.up]

    def choose(self, tried: Iterable[Instance] = ()) -> Instance:
        """The one with the fewest requests, of those the one that waited longest. Raises NoInstance."""
        tried = list(tried)
        free = [instance for instance in self.up if instance not in tried]
        if not free:
            after = f"; tried {', '.join(i.url for i in tried)}" if tried else ""
            raise NoInstance(
                f"no {self.role} engine is available: {len(self.up)} of {len(self.instances)} are up{after}"
            )
        return min(free, key=lambda instance: (instance.outstanding, instance.turn))

    @contextmanager
    def in_use(self, instance: Instance) -> Iterator[None]:
        """Counts a request to an engine."""
        instance.turn = next(self._turns)
        instance.outstanding += 1
        self._show(instance)
        try:
            yield
        finally:
            instance.outstanding -= 1
            self._show(instance)

    def succeeded(self, instance: Instance) -> None:
        """A request went well."""
        instance.failures = 0

    def failed(self, instance: Instance) -> None:
        """A request did not get through. After too many in a row the engine is out until a check succeeds."""
        self._metrics.failures.labels(self.role, instance.url).inc()
        instance.failures += 1
        self._judge(instance)

    def checked(self, instance: Instance, well: bool) -> None:
        """A check was answered well, or not."""
        instance.missed = 0 if well else instance.missed + 1
        if well and not instance.up:
            instance.up, instance.failures = True, 0
        self._judge(instance)

    def _judge(self, instance: Instance) -> None:
        if instance.up and max(instance.failures, instance.missed) >= self._fails:
            instance.up = False
            self._metrics.ejections.labels(self.role, instance.url).inc()
        self._show(instance)

    def _show(self, instance: Instance) -> None:
        self._metrics.up.labels(self.role, instance.url).set(instance.up)
        self._metrics.outstanding.labels(self.role, instance.url).set(instance.outstanding)
