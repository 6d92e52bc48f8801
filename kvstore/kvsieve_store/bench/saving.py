"""Sessions that save: each a process of its own that reserves and seals batches, as an engine's steps do."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any, Self

from kvsieve_store.bench.blocks import chain, random_keys
from kvsieve_store.client import StoreClient
from kvsieve_store.errors import KVSieveError
from kvsieve_store.protocol.spec import PoolSpec

ATTACH_SECONDS = 30.0
_ANSWER_SECONDS = 60.0

spawn = multiprocessing.get_context("spawn")
"""gRPC does not survive a fork."""


@dataclass(frozen=True)
class Load:
    """What the sessions do together.

    sessions: processes. batch: blocks of one seal. rate: blocks/s of each session; 0: as fast as it can.
    credits: slots that the store grants ahead, with each seal; 0: each batch asks with Reserve first.
    """

    sessions: int = 4
    batch: int = 256
    rate: float = 0.0
    credits: int = 0


@dataclass(frozen=True)
class Saved:
    """Of one session: blocks sealed, seconds that took, and batches that did not get all their slots."""

    blocks: int
    seconds: float
    short_batches: int


class Savers:
    """Starts attached and idle; go() lets them save until stop()."""

    def __init__(self, endpoint: str, spec: PoolSpec, load: Load) -> None:
        self._go, self._stop = spawn.Event(), spawn.Event()
        self._children: list[tuple[BaseProcess, Connection]] = []
        for number in range(load.sessions):
            here, there = spawn.Pipe()
            arguments = (endpoint, spec, load, number, self._go, self._stop, there)
            process = spawn.Process(target=_save, args=arguments, daemon=True)
            process.start()
            self._children.append((process, here))

    def __enter__(self) -> Self:
        """Waits until all are attached."""
        for _, pipe in self._children:
            receive(pipe)
        return self

    def go(self) -> None:
        self._go.set()

    def stop(self) -> list[Saved]:
        """What each session has saved since go()."""
        self._stop.set()
        self._go.set()
        return [receive(pipe) for _, pipe in self._children]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._go.set()
        for process, _ in self._children:
            process.join(_ANSWER_SECONDS if kind is None else 5.0)
            process.kill()


def receive(pipe: Connection) -> Any:
    """The next message of a child process. Raises KVSieveError when there is none."""
    try:
        if pipe.poll(_ANSWER_SECONDS):
            return pipe.recv()
    except EOFError:
        pass
    raise KVSieveError("bench: a process of the benchmark failed")


def _save(
    endpoint: str, spec: PoolSpec, load: Load, number: int, go: Event, stop: Event, pipe: Connection
) -> None:
    with StoreClient(endpoint, spec, engine_id=f"bench-save-{number}", credit_target=load.credits) as client:
        client.wait_attached(ATTACH_SECONDS)
        pipe.send("attached")
        go.wait()
        pause = load.batch / load.rate if load.rate else 0.0
        due = time.perf_counter() + pause * number / load.sessions
        blocks = short = 0
        started = time.perf_counter()
        while not stop.wait(max(due - time.perf_counter(), 0.0) if pause else 0.0):
            due += pause
            if not load.credits:
                client.reserve(load.batch)
            refs = client.take_credits(load.batch)
            short += len(refs) < load.batch
            if refs:
                client.seal(chain(random_keys(len(refs)), refs))
                blocks += len(refs)
        pipe.send(Saved(blocks, time.perf_counter() - started, short))
