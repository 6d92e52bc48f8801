"""Pins arenas for CUDA: registers their memory in chunks on a thread, and gives it back the same way.

Pinning hundreds of GiB takes minutes. The store has touched all of its memory before an engine attaches, so
that a chunk costs little more than the driver's bookkeeping.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from kvsieve_store.client import ArenaMap, ArenaMemory

logger = logging.getLogger("vllm.kvsieve")

CHUNK_BYTES = 1 << 30
"""Size of a chunk, about: the most that undo() waits for, and the step of progress."""

_ERRORS = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    201: "cudaErrorDeviceUninitialized",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
    999: "cudaErrorUnknown",
}


class Registrar(Protocol):
    """The calls of CUDA that pinning needs. Each returns 0, or CUDA's error code."""

    def enter(self) -> None:
        """Called once on the thread that makes the other calls."""

    def register(self, address: int, size: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaRegistrar:
    """Registrar for one CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        import torch

        torch.cuda.set_device(self._device)

    def register(self, address: int, size: int) -> int:
        import torch

        # No flags: where addresses are unified, registered memory is mapped and portable anyway.
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> int:
        import torch

        return int(torch.cuda.cudart().cudaHostUnregister(address))


class Pinnings:
    """What is pinned of arenas' memory: each memory once, for all sessions that share it."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._of: dict[ArenaMemory, Pinning] = {}

    def of(self, arena: ArenaMap) -> Pinning:
        """The pinning of the arena's memory; begins to pin what is not pinned yet. Returns at once."""
        pinning = self._of.get(arena.memory)
        if pinning is None:
            pinning = Pinning(arena.segments, arena.attachment.extent_bytes, self._registrar)
            self._of[arena.memory] = pinning
        else:
            pinning.extend(arena.segments)
        return pinning

    def let_go(self, memory: ArenaMemory) -> None:
        """Unpins memory, if it is pinned; see Pinning.undo(). May be called by any thread."""
        pinning = self._of.pop(memory, None)
        if pinning is not None:
            pinning.undo()

    def close(self) -> None:
        """Unpins all."""
        for memory in list(self._of):
            self.let_go(memory)


class Pinning:
    """The segments of an arena, and those that it grows by, pinned until undo(). Several can live at a time.

    Segments stay mapped for as long as they are pinned.
    """

    def __init__(
        self,
        segments: Sequence[npt.NDArray[np.uint8]],
        extent_bytes: int,
        registrar: Registrar,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """segments: uint8 [bytes] each, as ArenaMap.segments. Returns at once; a thread does the work."""
        self._extent_bytes = extent_bytes
        self._registrar = registrar
        self._clock = clock
        self._lock = threading.Lock()
        self._segments: dict[int, npt.NDArray[np.uint8]] = {}
        """Pinned or to be, by address."""
        self._batches: queue.SimpleQueue[list[npt.NDArray[np.uint8]] | None] = queue.SimpleQueue()
        self._under_way = 0
        self._pinned: list[int] = []
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvsieve-pin", daemon=True)
        self.extend(segments)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether all that was asked for is pinned."""
        return not (self._under_way or self._error or self._stop.is_set())

    @property
    def error(self) -> str | None:
        """Why what was asked for last can't be pinned; extend() tries again."""
        return self._error

    def extend(self, segments: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Pins those of the segments that are not pinned yet, in addition; the others stay as they are.
        Returns at once."""
        with self._lock:
            batch = [s for s in segments if int(s.ctypes.data) not in self._segments]
            if not batch:
                return
            self._segments.update((int(s.ctypes.data), s) for s in batch)
            self._error = None
            self._under_way += 1
        self._batches.put(batch)

    def undo(self) -> None:
        """Unpins and forgets the segments; waits for a chunk that is being pinned. No copy or kernel that
        reads them may be under way. May be called again."""
        self._stop.set()
        self._batches.put(None)
        self._thread.join()
        self._segments.clear()

    def _run(self) -> None:
        """Pins until undo(), unpins. On one thread, because CUDA keeps the last error per thread."""
        self._registrar.enter()
        while (batch := self._batches.get()) is not None:
            error = self._pin(batch)
            with self._lock:
                if error:
                    logger.error("kvsieve: %s", error)
                    self._error = error
                    for segment in batch:
                        del self._segments[int(segment.ctypes.data)]
                self._under_way -= 1
        self._unpin(self._pinned)

    def _pin(self, batch: list[npt.NDArray[np.uint8]]) -> str | None:
        """All of the batch, or nothing of it; then returns why."""
        todo = list(chunks([(int(s.ctypes.data), s.nbytes) for s in batch], self._extent_bytes))
        total = sum(chunk.size for chunk in todo)
        progress = Progress(total, self._clock)
        done = 0
        pinned: list[int] = []
        for chunk in todo:
            if self._stop.is_set():
                break
            if error := self._registrar.register(chunk.address, chunk.size):
                self._unpin(pinned)
                return failure(error, chunk.size, done, total, _memlock())
            pinned.append(chunk.address)
            done += chunk.size
            if line := progress.line(done):
                logger.info("kvsieve: %s", line)
        self._pinned += pinned
        return None

    def _unpin(self, addresses: list[int]) -> None:
        while addresses:
            address = addresses.pop()
            if error := self._registrar.unregister(address):
                logger.warning("kvsieve: unpinning the arena at %#x failed: %s", address, error_name(error))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one call registers. size: bytes."""

    address: int
    size: int


def chunks(
    segments: Sequence[tuple[int, int]], extent_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Chunks of at most `chunk_bytes`, or one extent if that is more, that cover segments (address, bytes).

    Chunks begin and end with extents: a slot never crosses extents, and CUDA refuses a copy that crosses from
    one registration to another.
    """
    step = max(1, chunk_bytes // extent_bytes) * extent_bytes
    for address, size in segments:
        for at in range(0, size, step):
            yield Chunk(address + at, min(step, size - at))


class Progress:
    """When pinning is worth a line: every 10 %, or after 10 s, but once a second at most; and at the end."""

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._started = self._told_at = clock()
        self._told = 0

    def line(self, done: int) -> str | None:
        """done: bytes. The line to log now, if there is one."""
        now = self._clock()
        waited = now - self._told_at
        step = done - self._told >= self._total / 10
        if done < self._total and not (waited >= 10 or (step and waited >= 1)):
            return None
        self._told, self._told_at = done, now
        seconds = max(now - self._started, 1e-3)
        rate = f"{_gib(done):.1f} of {_gib(self._total):.1f} GiB, {_gib(done) / seconds:.1f} GiB/s"
        return f"the arena is pinned: {rate}" if done == self._total else f"pinning the arena: {rate}"


def failure(error: int, size: int, done: int, total: int, memlock: int | None) -> str:
    """What to tell when a chunk of `size` bytes, after `done` of `total`, was refused with CUDA's `error`.

    memlock: soft limit of RLIMIT_MEMLOCK, bytes; None: unlimited.
    """
    if memlock is not None and memlock < total:
        limit = f"{_gib(memlock):.2f} GiB"
        remedy = (
            f"raise it to unlimited (ulimit -l, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in a "
            f"container) or start the store with a --pool-size below {limit}"
        )
    else:
        limit = "unlimited" if memlock is None else f"{_gib(memlock):.2f} GiB"
        remedy = (
            "start the store with a smaller --pool-size, or raise the memory limit of the engine's container"
        )
    return (
        f"pinning the arena failed at {_gib(done):.1f} of {_gib(total):.1f} GiB: cudaHostRegister of "
        f"{_gib(size):.2f} GiB returned {error_name(error)}; RLIMIT_MEMLOCK is {limit}. Blocks are neither "
        f"saved nor loaded until it succeeds, which is tried again whenever the engine attaches: {remedy}"
    )


def error_name(error: int) -> str:
    """CUDA's name of an error code that registration may return."""
    return f"{_ERRORS.get(error, 'CUDA error')} ({error})"


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _gib(size: float) -> float:
    return size / 2**30
