"""BlockWaits: who waits for which block to be there, or on its way. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvsieve_store.errors import CapacityError
from kvsieve_store.protocol.limits import KEY_BYTES

MAX_WAITS = 1024
MAX_WAITS_PER_PEER = 256


@dataclass(eq=False, slots=True)
class Wait:
    """Of one caller. wake: called once, when the block has come or nobody is to wait any more."""

    place: tuple[bytes, bytes]
    peer: str
    wake: Callable[[], None]


class BlockWaits:
    """A wait ends by its wake or by end(), whichever is first. A method that raises has changed nothing."""

    def __init__(self, most: int = MAX_WAITS, most_per_peer: int = MAX_WAITS_PER_PEER) -> None:
        self._most, self._most_per_peer = most, most_per_peer
        self._waits: dict[tuple[bytes, bytes], list[Wait]] = {}
        self._peers: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._peers.total()

    def begin(self, pool_id: bytes, key: bytes, peer: str, wake: Callable[[], None]) -> Wait:
        """Raises CapacityError when too many wait, of this peer or in all."""
        if len(self) >= self._most:
            raise CapacityError(f"wait_ms: {self._most} offers wait for blocks, the most; try again later")
        if self._peers[peer] >= self._most_per_peer:
            raise CapacityError(
                f"wait_ms: {self._most_per_peer} offers of this peer wait, the most; try again later"
            )
        wait = Wait((pool_id, key), peer, wake)
        self._waits.setdefault(wait.place, []).append(wait)
        self._peers[peer] += 1
        return wait

    def end(self, wait: Wait) -> None:
        """Nobody waits any more. Does nothing after the wake."""
        waits = self._waits.get(wait.place, [])
        if wait in waits:
            waits.remove(wait)
            if not waits:
                del self._waits[wait.place]
            self._forget(wait)

    def came(self, pool_id: bytes, keys: bytes) -> None:
        """These blocks are sealed, or being written: wakes who waits for one of them. keys: 32 bytes each,
        end to end."""
        if not self._waits:
            return
        for at in range(0, len(keys), KEY_BYTES):
            self._wake(self._waits.pop((pool_id, keys[at : at + KEY_BYTES]), ()))

    def wake_all(self) -> None:
        for place in list(self._waits):
            self._wake(self._waits.pop(place))

    def _wake(self, waits: list[Wait] | tuple[()]) -> None:
        for wait in waits:
            self._forget(wait)
            wait.wake()

    def _forget(self, wait: Wait) -> None:
        self._peers[wait.peer] -= 1
        if not self._peers[wait.peer]:
            del self._peers[wait.peer]
