"""How long after its last block a prompt is to be had at another store, and what a match takes meanwhile."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvsieve_store.bench.blocks import chain, pool, random_keys
from kvsieve_store.bench.matching import Matcher
from kvsieve_store.bench.report import Goal, Report, latencies_us
from kvsieve_store.bench.saving import ATTACH_SECONDS, receive, spawn
from kvsieve_store.bench.store import TemporaryStore
from kvsieve_store.client import AdminClient, ArenaMap, SealEntry, StoreClient
from kvsieve_store.client.remote import RemoteBlocks
from kvsieve_store.errors import KVSieveError
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.ucx.binding import why_missing
from kvsieve_store.transport.ucx.engine import Engine

_LIMIT_MS = 10.0
_MATCH_P99_US = 2000.0
_PULL_SECONDS = 60.0
_READS = 15


@dataclass(frozen=True)
class Case:
    """A prompt: `steps` prefill steps of `step_blocks` blocks, one every `step_seconds`, and a last one of
    `last_blocks`. A step writes its blocks layer by layer, evenly over its time."""

    block_bytes: int
    step_blocks: int = 8
    steps: int = 4
    last_blocks: int = 1
    step_seconds: float = 0.05
    layers: int = 30

    @property
    def batches(self) -> list[int]:
        """Blocks of each seal."""
        return [self.step_blocks] * self.steps + [self.last_blocks]


CASES = (
    Case(256 << 10, layers=32),
    Case(256 << 10, layers=32, last_blocks=8),
    Case(2880 << 10),  # SmolLM2-135M, 32 tokens; DeepSeek-V3.2's main plane, 64 tokens, takes 2.4 MiB
    Case(2880 << 10, last_blocks=8),
)
STREAM = Case(2880 << 10, steps=8)
"""What is pulled while matches are timed: 470 MB/s."""


def measure(
    *,
    cases: Sequence[Case] = CASES,
    stream: Case = STREAM,
    repetitions: int = 30,
    matches: int = 500,
    keys: int = 1000,
    transports: Sequence[str] = ("shm", "ucx", "tcp"),
    pool_size: str = "768MiB",
) -> Report:
    """Two stores on loopback. A writer seals a prompt in the one step by step while the other one pulls it.

    Times run from the call that seals the last block until the reader's match has it, beside what a read of
    one block takes by the same transport. Every other prompt is announced, so that its layers are read as
    they are written; the ratio is that of the medians, with to without. Then matches of `keys` keys: at the
    pulling store with nobody pulling; during such hand-offs at a third one, which has no part in them, so
    that it is seen what the machine is short of; and at the one that pulls.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for transport in transports:
        if transport == "ucx" and why_missing():
            continue
        with _Pair(transport, pool_size) as pair:
            rows += (timed := [_handed_over(pair, case, repetitions) for case in cases])
            rows += (matched := _matched(pair, stream, matches, keys))
        goals += [
            Goal(
                f"{transport}, {_named(case)}: hand-off, median",
                row["p50_us"] / 1e3,
                _LIMIT_MS + row["block_us"] / 1e3,
                "ms",
                at_least=False,
            )
            for case, row in zip(cases, timed, strict=True)
        ]
        goals.append(
            Goal(
                f"{transport}: match p99 while it pulls",
                matched[-1]["match_p99_us"],
                _MATCH_P99_US,
                "us",
                at_least=False,
            )
        )
    parameters = {
        "repetitions": repetitions,
        "matches": matches,
        "keys": keys,
        "stream": vars(stream),
        "ucx": why_missing() or "there",
    }
    return Report("handoff", parameters, rows, goals)


def _named(case: Case) -> str:
    return f"{case.block_bytes >> 10:,} KiB, last step {case.last_blocks} block{'s' * (case.last_blocks > 1)}"


class _Pair:
    """Two stores, of which the one reads from the other by one transport, and one beside them."""

    def __init__(self, transport: str, pool_size: str) -> None:
        self.transport = transport
        self._exits = ExitStack()
        self._flags = ["--pool-size", pool_size, "--peer-transports", transport]
        self._flags += ["--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0"]
        self._flags += ["--peer-allow", "127.0.0.0/8"]

    def __enter__(self) -> _Pair:
        with ExitStack() as exits:
            self.source = exits.enter_context(TemporaryStore(*self._flags)).endpoint
            self.target = exits.enter_context(TemporaryStore(*self._flags)).endpoint
            self.beside = exits.enter_context(TemporaryStore(*self._flags)).endpoint
            self.engine = None
            if self.transport == "ucx":
                self.engine = Engine("tcp", {"NET_DEVICES": "lo"})
                exits.callback(self.engine.close)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.close()


class _HandOffs:
    """A writer in a process of its own, and a reader in this one, of one case's prompts."""

    def __init__(self, pair: _Pair, case: Case) -> None:
        self._case = case
        self._spec = pool(f"handoff-{case.block_bytes}", (case.block_bytes // case.layers,) * case.layers)
        self._pair = pair
        self._blocks = sum(case.batches)
        self._here, there = spawn.Pipe()
        self._writer = spawn.Process(target=_write, args=(pair.source, self._spec, case, there), daemon=True)
        self._reader = StoreClient(pair.target, self._spec, engine_id="bench-read", credit_target=0)
        self.last_keys: list[bytes] = []

    def __enter__(self) -> _HandOffs:
        self._writer.start()
        self._reader.start()
        self._reader.wait_attached(ATTACH_SECONDS)
        self._address = receive(self._here)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._here.close()
        self._writer.join(5.0)
        self._writer.kill()
        self._reader.close()
        self.clear()

    def clear(self) -> None:
        """All the room to the next one."""
        for endpoint in (self._pair.source, self._pair.target):
            with AdminClient(endpoint) as admin:
                admin.clear()

    def one(self, *, announce: bool = True, check: bool = False) -> tuple[float, float]:
        """One prompt: seconds from the call that seals its last block until the pull is over, and until the
        reader's match has it. announce: blocks while they are written. check: compares the bytes of all."""
        keys = self.last_keys = random_keys(self._blocks)
        pull = self._reader.pull_async(self._address, keys, seconds=_PULL_SECONDS, wait_seconds=_PULL_SECONDS)
        self._here.send((keys, announce))
        came = pull.result(2 * _PULL_SECONDS)
        pulled = time.monotonic()
        if came.present < self._blocks:
            raise KVSieveError(f"bench: {came.present} of {self._blocks} blocks came: {came.reason}")
        match = self._reader.match(keys)
        matched = time.monotonic()
        if len(match.refs) != self._blocks:
            raise KVSieveError(f"bench: {len(match.refs)} of {self._blocks} blocks match")
        if check:
            with ArenaMap(self._reader.wait_attached(ATTACH_SECONDS)) as arena:
                if not all(
                    (arena.slot(ref.slot) == _content(key)[0]).all()
                    for key, ref in zip(keys, match.refs, strict=True)
                ):
                    raise KVSieveError("bench: blocks came with other bytes")
        self._reader.release(match.lease_ids, epoch=match.epoch)
        sealed = receive(self._here)
        return pulled - sealed, matched - sealed

    def read_block(self) -> float:
        """Seconds that a read of one block of the last prompt takes, median."""
        size = self._case.block_bytes
        memory = Memory([np.zeros(size, np.uint8)])
        ranges, into = np.array([[0, 0, size]], np.uint64), np.zeros(1, np.uint64)
        times = []
        with RemoteBlocks(
            self._address,
            self._spec,
            self.last_keys[:1],
            memory,
            engine=self._pair.engine,
            transports=[self._pair.transport],
        ) as remote:
            for _ in range(_READS):
                started = time.perf_counter()
                remote.read(ranges, into)
                times.append(time.perf_counter() - started)
        return statistics.median(times)


def _content(key: bytes) -> np.ndarray[Any, Any]:
    """uint8 [1]: what all bytes of a block are."""
    return np.frombuffer(key[:1], np.uint8)


def _write(endpoint: str, spec: PoolSpec, case: Case, pipe: Connection) -> None:
    """Seals a prompt for each list of keys that comes, announced or not; says when it sealed the last
    batch."""
    with StoreClient(endpoint, spec, engine_id="bench-write", credit_target=0) as client:
        attachment = client.wait_attached(ATTACH_SECONDS)
        with ArenaMap(attachment) as arena:
            pipe.send(attachment.peer_address)
            while True:
                try:
                    keys, announce = pipe.recv()
                except (EOFError, ConnectionResetError):
                    return
                at, due, parent, sealed = 0, time.monotonic(), b"", 0.0
                for count in case.batches:
                    part, at = keys[at : at + count], at + count
                    client.reserve(count)
                    refs = client.take_credits(count)
                    entries = chain(part, refs, parent)
                    if announce:
                        client.announce_async(entries)
                    for layer in range(case.layers):
                        _write_layer(arena, entries, layer, case)
                        due += case.step_seconds / case.layers
                        time.sleep(max(due - time.monotonic(), 0.0))
                    sealed = time.monotonic()
                    client.seal(entries)
                    parent = part[-1]
                pipe.send(sealed)


def _write_layer(arena: ArenaMap, entries: Sequence[SealEntry], layer: int, case: Case) -> None:
    size = case.block_bytes // case.layers
    for key, _, ref in entries:
        arena.slot(ref.slot)[layer * size : (layer + 1) * size] = _content(key)
        arena.set_layers_done(ref.slot, 0, layer + 1)


def _handed_over(pair: _Pair, case: Case, repetitions: int) -> dict[str, Any]:
    with _HandOffs(pair, case) as hand_offs:
        hand_offs.one(check=True)
        announced: list[tuple[float, float]] = []
        sealed: list[tuple[float, float]] = []
        for i in range(2 * repetitions):
            hand_offs.clear()  # a full store may evict what nobody has read yet
            announce = i % 4 in (0, 3)
            (announced if announce else sealed).append(hand_offs.one(announce=announce))
        block = hand_offs.read_block()
    pulled, without = (statistics.median(each for each, _ in times) for times in (announced, sealed))
    return {
        "transport": pair.transport,
        "block_bytes": case.block_bytes,
        "last_blocks": case.last_blocks,
        "block_us": round(block * 1e6, 1),
        "pulled_p50_us": round(pulled * 1e6, 1),
        "sealed_only_p50_us": round(without * 1e6, 1),
        "ratio": round(pulled / without, 3),
        **latencies_us([matched for _, matched in announced]),
    }


def _matched(pair: _Pair, stream: Case, matches: int, keys: int) -> list[dict[str, Any]]:
    """Matches with nobody pulling, then while one store does: at a third one, and at this one."""
    rows = []
    cases = ((pair.target, False, "target"), (pair.beside, True, "beside"), (pair.target, True, "target"))
    for endpoint, pulls, store in cases:
        with (
            Matcher(endpoint, pool("match"), keys, matches, 0.005) as matcher,
            _pulling(pair, stream, pulls),
        ):
            seconds = matcher.go()
        times = {f"match_{name}": value for name, value in latencies_us(seconds).items()}
        rows.append({"transport": pair.transport, "store": store, "pulls": pulls, **times})
    return rows


@contextmanager
def _pulling(pair: _Pair, stream: Case, pulls: bool) -> Iterator[None]:
    if not pulls:
        yield
        return
    stop = threading.Event()
    with _HandOffs(pair, stream) as hand_offs:
        hand_offs.one()

        def run() -> None:
            while not stop.is_set():
                hand_offs.one()

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(run)
            try:
                yield
            finally:
                stop.set()
            running.result()
