"""Blocks over loopback by each transport, against a raw socket, UCX's own benchmark and NIXL."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil

from kvsieve_store.addresses import TcpAddress
from kvsieve_store.bench.nixl import PYTHON, Nixl
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.errors import KVSieveError, UnavailableError
from kvsieve_store.transport.connect import connect
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.exports import Exports
from kvsieve_store.transport.memory import Memory, U64Array
from kvsieve_store.transport.tcp import TcpListener
from kvsieve_store.transport.ucx.binding import why_missing
from kvsieve_store.transport.ucx.engine import TCP_SETTINGS, Engine
from kvsieve_store.transport.ucx.listener import UcxListener

_LOCAL = "127.0.0.1"
_LOOPBACK = {"NET_DEVICES": "lo"}
_RAW_PIECE = 4 << 20
_SECONDS = 120.0
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Case:
    """`count` ranges of `size` bytes, end to end or `scattered` at random over all the memory; one call."""

    name: str
    count: int
    size: int
    scattered: bool
    goal: float


CASES = (
    Case("blocks of 64 KiB", 1024, 64 << 10, False, 0.9),
    Case("blocks of 1 MiB", 64, 1 << 20, False, 0.9),
    Case("1,000 ranges of 42 KB, scattered", 1000, 42_000, True, 0.7),
)


def measure(
    *,
    repetitions: int = 15,
    cases: Sequence[Case] = CASES,
    idle_seconds: float = 5.0,
    memory: int = 256 << 20,
    nixl_python: str = "",
) -> Report:
    """Bytes/s of Link.read() as a share of a raw socket's, medians over interleaved repetitions; and the CPU
    time of both sides while nothing is read.

    memory: bytes that are read from. nixl_python: an interpreter with nixl-cu12, to have NIXL read the same
    ranges in the same turns; empty: without.
    """
    with _peer(memory) as (peer, process), ExitStack() as exits:
        links: dict[str, Any] = {}
        buffer = np.zeros(max((case.count * case.size for case in cases), default=1 << 12), np.uint8)
        here = Memory([buffer])
        token = bytes.fromhex(peer["token"])
        description = Description.of(peer["description"].encode())
        engine = None
        if why_missing() is None:
            engine = Engine("tcp", _LOOPBACK)
            exits.callback(engine.close)
        for name in ("tcp", "ucx") if engine else ("tcp",):
            deadline = time.monotonic() + _SECONDS
            links[name] = connect(description, token, here, deadline, engine=engine, transports=[name])
            exits.callback(links[name].close)
        raw = exits.enter_context(socket.create_connection((_LOCAL, peer["raw_port"])))
        nixl, why_not = _nixl(nixl_python, memory, len(buffer), exits)
        rows = [_case(case, links, token, raw, buffer, memory, repetitions, nixl) for case in cases]
        idle = _idle(process.pid, idle_seconds)
    parameters = {
        "repetitions": repetitions,
        "memory_bytes": memory,
        "ucx": why_missing() or "there",
        "nixl": why_not or "there",
    }
    goals = [
        Goal(f"{name}, {case.name}, against a raw socket", row[f"{name}_vs_raw"], case.goal, "x")
        for name in links
        for case, row in zip(cases, rows, strict=True)
    ]
    goals += [
        Goal(f"{name}, {case.name}, against NIXL", row[f"{name}_vs_nixl"], 1.0, "x")
        for name in (links if nixl else ())
        for case, row in zip(cases, rows, strict=True)
    ]
    goals += [
        Goal(f"CPU of a {side} whose links are idle", idle[side], 2.0, "% of a core", at_least=False)
        for side in idle
    ]
    return Report("transport", parameters, [*rows, {"idle_percent": idle}], goals)


def _nixl(python: str, served: int, read: int, exits: ExitStack) -> tuple[Nixl | None, str]:
    """It, or why it is left out."""
    if not python:
        return None, f"{PYTHON}: not set"
    try:
        return exits.enter_context(Nixl(python, served, read, _ucx_environ())), ""
    except UnavailableError as error:
        return None, str(error)


def _case(
    case: Case,
    links: dict[str, Any],
    token: bytes,
    raw: socket.socket,
    buffer: np.ndarray[Any, Any],
    memory: int,
    repetitions: int,
    nixl: Nixl | None,
) -> dict[str, Any]:
    ranges, into = _ranges(case, memory)
    total = case.count * case.size

    def raw_read() -> float:
        started = time.perf_counter()
        raw.sendall(total.to_bytes(8, "little"))
        view, got = buffer.data[:total], 0
        while got < total:
            got += raw.recv_into(view[got:], 0, socket.MSG_WAITALL)
        return time.perf_counter() - started

    def read(name: str) -> float:
        started = time.perf_counter()
        links[name].read(token, ranges, into, time.monotonic() + _SECONDS)
        return time.perf_counter() - started

    runs: dict[str, Callable[[], float]] = {"raw": raw_read, **{name: partial(read, name) for name in links}}
    if nixl is not None:
        nixl.prepare(ranges[:, 0] * np.uint64(_BLOCK) + ranges[:, 1], into, case.size)
        runs["nixl"] = lambda: nixl.read()[0]
    times: dict[str, list[float]] = {name: [] for name in runs}
    perftest: list[float] = []
    for turn in range(repetitions + 1):
        for name in list(runs) if turn % 2 else reversed(runs):
            seconds = runs[name]()
            if turn:  # the first turn warms up
                times[name].append(seconds)
        if turn % 5 == 1 and not case.scattered:
            perftest += _perftest(case.size)
    read("tcp")
    if nixl is not None and nixl.read()[1] != int(buffer[:: 1 << 12].sum()):
        raise KVSieveError("bench: NIXL reads other bytes than the links")
    row: dict[str, Any] = {"case": case.name, "bytes": total}
    for name in runs:
        row[f"{name}_gb_s"] = round(total / statistics.median(times[name]) / 1e9, 2)
        row[f"{name}_vs_raw"] = _ratio(times["raw"], times[name])
        if nixl is not None and name in links:
            row[f"{name}_vs_nixl"] = _ratio(times["nixl"], times[name])
    if perftest:
        row["ucx_perftest_gb_s"] = round(statistics.median(perftest), 2)
    return row


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return round(statistics.median(r / t for r, t in zip(theirs, ours, strict=True)), 3)


def _ranges(case: Case, memory: int) -> tuple[U64Array, U64Array]:
    into = np.arange(case.count, dtype=np.uint64) * np.uint64(case.size)
    if case.scattered:
        at = np.random.default_rng(0).permutation(memory // case.size)[: case.count] * case.size
    else:
        at = np.arange(case.count) * case.size
    # The export's blocks are of 1 MiB; a range that would cross the end of one begins at its start instead.
    block, offset = np.divmod(at, _BLOCK)
    offset[offset + case.size > _BLOCK] = 0
    ranges = np.stack([block, offset, np.full(case.count, case.size)], axis=1).astype(np.uint64)
    return ranges, into


def _perftest(size: int) -> list[float]:
    """GB/s of UCX's own benchmark in messages of this size, over loopback; none where it is not installed.

    ucx_perftest: tagged messages, one after another, both sides polling without a pause.
    """
    if shutil.which("ucx_perftest") is None or why_missing() is not None:
        return []
    with socket.create_server((_LOCAL, 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**os.environ, **_ucx_environ()}
    command = [
        "ucx_perftest",
        "-p",
        str(port),
        "-t",
        "tag_bw",
        "-s",
        str(size),
        "-n",
        str(min((256 << 20) // size, 10_000)),
        "-f",
    ]
    server = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(20):
            time.sleep(0.1)
            ran = subprocess.run([*command, _LOCAL], env=environ, capture_output=True, text=True, timeout=60)
            # iterations, three latencies, two bandwidths in MB/s (of 2^20 bytes), two message rates
            numbers = re.findall(r"^\s*\d+\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+([\d.]+)", ran.stdout, re.M)
            if numbers:
                return [float(numbers[-1]) * (1 << 20) / 1e9]
    except subprocess.TimeoutExpired:
        pass
    finally:
        server.kill()
        server.wait()
    return []


def _ucx_environ() -> dict[str, str]:
    """What makes any UCX take the way that ours takes here."""
    tuned = {f"UCX_{name}": value for name, value in TCP_SETTINGS.items()}
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", **tuned}


def _idle(pid: int, seconds: float) -> dict[str, float]:
    """CPU time of reader and store, percent of a core."""
    processes = {"reader": psutil.Process(), "store": psutil.Process(pid)}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(seconds)
    return {
        name: round(100 * (sum(process.cpu_times()[:2]) - before[name]) / seconds, 2)
        for name, process in processes.items()
    }


@contextmanager
def _peer(memory: int) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "kvsieve_store.bench.transporting", str(memory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = b""
        while not line.startswith(b"{"):  # UCX may have something to say first
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the peer's process died")
        yield json.loads(line), process
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def _serve(memory: int) -> None:
    """The peer: the same bytes by every transport and by a raw socket, until its input ends."""
    buffer = np.random.default_rng(0).integers(0, 256, memory, np.uint8)
    exports = Exports(Memory([buffer]))
    listener = TcpListener(exports, TcpAddress(_LOCAL, 0))
    engine = Engine("tcp", _LOOPBACK) if why_missing() is None else None
    ucx = UcxListener(engine, exports) if engine else None
    token = exports.open(np.arange(0, memory, _BLOCK, dtype=np.uint64), _BLOCK)
    raw = socket.create_server((_LOCAL, 0))
    threading.Thread(target=_serve_raw, args=(raw, buffer.data), daemon=True).start()
    said = {
        "description": Description(tcp=listener.address.host_port, ucx=ucx.description if ucx else None)
        .pack()
        .decode(),
        "token": token.hex(),
        "raw_port": raw.getsockname()[1],
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    listener.close()
    if ucx and engine:
        ucx.close()
        engine.close()


def _serve_raw(server: socket.socket, data: memoryview) -> None:
    """As many bytes as are asked for, end to end: no more than a socket has to do."""
    sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := sock.recv(8, socket.MSG_WAITALL):
        total = int.from_bytes(asked, "little")
        for at in range(0, total, _RAW_PIECE):
            sock.sendall(data[at : min(at + _RAW_PIECE, total)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
