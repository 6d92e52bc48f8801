"""The arenas of a worker: the memory of a store mapped and pinned once, whatever sessions come and go.

A session's own is its lock, which says to the store that its slots are still read, and ends with its last
reader. The memory behind it stays while its store lives and the engine uses no other: to map and pin hundreds
of GiB anew would take minutes. A dead store's is given up at once, so that the next store finds it free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvsieve_store.client import ArenaMap, ArenaMemory, Attachment

POLL_SECONDS = 1.0
"""How soon the death of a store is noticed whose memory no session uses."""


class Arenas:
    """map() and leave() are for one thread."""

    def __init__(self, let_go: Callable[[ArenaMemory], None]) -> None:
        """let_go: called on a thread, as it may take long, for memory that nobody uses any more."""
        self._let_go = let_go
        self._users: dict[ArenaMemory, set[ArenaMap]] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._threads: list[threading.Thread] = []

    def map(self, attachment: Attachment) -> ArenaMap:
        """The arena for a session, with a lock of its own. Raises as the constructor of ArenaMap does."""
        with self._changed:
            memory = next((m for m in self._users if m.instance == attachment.instance), None)
            arena = ArenaMap(attachment, memory)
            self._users.setdefault(arena.memory, set()).add(arena)
            self._changed.notify_all()
        return arena

    def leave(self, arena: ArenaMap) -> None:
        """Gives up the session's lock: nothing reads or writes its slots any more. Returns at once."""
        memory = arena.memory
        arena.close()
        with self._changed:
            self._users[memory].discard(arena)
            if self._users[memory]:
                return
        thread = threading.Thread(target=self._rest, args=(memory,), name="kvsieve-arena", daemon=True)
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def close(self) -> None:
        """Gives up all memory, and waits for that; every arena has been left."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _rest(self, memory: ArenaMemory) -> None:
        """A thread for memory without a user: waits for the next one, or gives the memory up."""
        with self._changed:
            while self._users.get(memory) == set() and self._may_be_wanted(memory):
                self._changed.wait(POLL_SECONDS)
            if self._users.get(memory) != set():
                return
            del self._users[memory]
        self._let_go(memory)

    def _may_be_wanted(self, memory: ArenaMemory) -> bool:
        return not self._ending and not any(self._users.values()) and memory.store_lives()
