"""Arenas without a store: plain files, the lock that says that a store lives, and locks of sessions."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from kvsieve_store.client import Attachment
from kvsieve_store.protocol.layout import STORE_LOCK, ExtentLayout

EXTENT = 64 << 10
LAYOUT = ExtentLayout.of(EXTENT, 8192)
SEGMENTS = (2 * EXTENT, EXTENT, 3 * EXTENT)
SLOTS = sum(SEGMENTS) // EXTENT * LAYOUT.slots_per_extent


class ArenaFiles:
    """What a store leaves for its engines to see, in a directory of its own under `tmp`."""

    def __init__(self, tmp: Path, segments: tuple[int, ...] = SEGMENTS) -> None:
        self.path = tmp / f"kvsieve-{secrets.token_hex(4)}"
        self.path.mkdir()
        self.instance = secrets.token_bytes(16)
        self.segments: list[tuple[str, int]] = []
        self.epoch = 0
        for size in segments:
            self.grow(size)
        self._lock: int | None = os.open(self.path / STORE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def grow(self, size: int) -> None:
        """One more segment."""
        path = self.path / f"seg-{len(self.segments)}"
        with path.open("wb") as file:
            file.truncate(size)
        self.segments.append((str(path), size))

    def attach(self) -> Attachment:
        """A new session."""
        self.epoch += 1
        lock = self.path / f"session-{self.epoch}.lock"
        lock.touch()
        return Attachment(
            epoch=self.epoch,
            instance=self.instance,
            pool_id=bytes(32),
            extent_bytes=EXTENT,
            segments=tuple(self.segments),
            slot_bytes=LAYOUT.slot_bytes,
            slots_per_extent=LAYOUT.slots_per_extent,
            slots_offset=LAYOUT.slots_offset,
            lock_path=str(lock),
            store_version="0",
        )

    def die(self) -> None:
        """As by SIGKILL: the files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def end(self) -> None:
        """As by SIGTERM."""
        shutil.rmtree(self.path)
        self.die()


def again(attachment: Attachment) -> Attachment:
    """Another session with the store of this one."""
    lock = Path(attachment.lock_path).with_name(f"session-{secrets.token_hex(4)}.lock")
    lock.touch()
    return replace(attachment, epoch=attachment.epoch + 1, lock_path=str(lock))


def mappings(path: str | Path) -> int:
    """How often files under `path` are mapped in this process."""
    return sum(f" {path}" in line for line in Path("/proc/self/maps").read_text().splitlines())
