"""What steps in flight may still read, and is given back when none does: leases and slots of requests that
ended, and the arenas of sessions that are over."""

from __future__ import annotations

from collections.abc import Iterable

from kvsieve_store.client import SlotRef


class Releases:
    """Counts the steps. Leases and slots come with the epoch of their session: another one's mean nothing."""

    def __init__(self, overlap: int) -> None:
        """overlap: steps that can be in flight at once."""
        self._overlap = overlap
        self.step = 0
        self._later: list[tuple[int, list[tuple[int, int]], list[tuple[int, SlotRef]]]] = []
        """Leases and slots that are given back from this step on."""
        self._busy: dict[int, int] = {}
        """Epoch -> step from which on no step in flight reads its arena for requests that ended."""

    def __bool__(self) -> bool:
        """Whether leases or slots wait to be given back."""
        return bool(self._later)

    def begin_step(self) -> None:
        self.step += 1

    def add(
        self, leases: list[tuple[int, int]], slots: Iterable[tuple[int, SlotRef]], epochs: Iterable[int] = ()
    ) -> None:
        """What a request that ends now has read: leases (epoch, id), slots (epoch, slot), arenas by epoch."""
        slots = list(slots)
        if leases or slots:
            self._later.append((self._quiet_step, leases, slots))
        for epoch in epochs:
            self._busy[epoch] = self._quiet_step

    def due(self, epoch: int) -> tuple[list[int], list[SlotRef]]:
        """Leases and slots of this session that no step reads any more; each once."""
        due = [entry for entry in self._later if entry[0] <= self.step]
        self._later = [entry for entry in self._later if entry[0] > self.step]
        leases = [lease for _, held, _ in due for of, lease in held if of == epoch]
        return leases, [ref for _, _, kept in due for of, ref in kept if of == epoch]

    def session_over(self, epoch: int) -> None:
        """Steps in flight may read its arena."""
        self._busy[epoch] = self._quiet_step

    def has_past(self, epoch: int) -> bool:
        """Whether another session's arena has not been found unread."""
        return bool(self._busy.keys() - {epoch})

    def unread(self, read: set[int], epoch: int) -> list[int]:
        """Sessions other than this one whose arena no step reads any more; each once. read: those that a
        request reads."""
        over = [of for of, step in self._busy.items() if of not in read and of != epoch and step <= self.step]
        for of in over:
            del self._busy[of]
        return over

    @property
    def _quiet_step(self) -> int:
        """From this step's orders on, no step reads what a request that ends now has read: the next step's
        orders end it, and by then as many steps as can overlap have followed."""
        return self.step + 1 + self._overlap
