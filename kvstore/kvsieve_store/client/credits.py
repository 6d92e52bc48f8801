"""Slots granted ahead: any thread takes them at once, without the event loop."""

from __future__ import annotations

import threading
from collections import deque

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.client.handles import SlotRef


class Credits:
    """The free slots of one session, first in, first out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: deque[SlotRef] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def grant(self, credits: pb.Credits) -> int:
        """Adds what the store granted; returns how many slots that is. Nothing once closed."""
        refs = list(map(SlotRef, credits.slots, credits.generations))
        with self._lock:
            if self._closed:
                return 0
            self._slots.extend(refs)
        return len(refs)

    def take(self, count: int) -> list[SlotRef]:
        """At most `count` slots, fewer when there are no more."""
        with self._lock:
            return [self._slots.popleft() for _ in range(min(count, len(self._slots)))]

    def close(self) -> list[SlotRef]:
        """Takes all that is left; nothing can be granted any more."""
        with self._lock:
            self._closed = True
            left = list(self._slots)
            self._slots.clear()
        return left
