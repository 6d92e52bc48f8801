"""How long a match takes while other sessions save."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from kvsieve_store.bench.blocks import chain, pool, random_keys
from kvsieve_store.bench.report import Goal, Report, latencies_us
from kvsieve_store.bench.saving import ATTACH_SECONDS, Load, Savers, receive, spawn
from kvsieve_store.client import StoreClient
from kvsieve_store.errors import KVSieveError
from kvsieve_store.protocol.limits import MAX_BATCH
from kvsieve_store.protocol.spec import PoolSpec

IDLE = Load(sessions=0)

PACED = Load(sessions=4, batch=256, rate=2000)
"""An engine that prefills 32,000 tokens/s in blocks of 16 tokens seals 2,000 blocks/s."""

UNPACED = Load(sessions=4, batch=256)

_P99_US = 2000.0


def measure(
    endpoint: str,
    *,
    keys: int = 1000,
    matches: int = 2000,
    pause: float = 0.005,
    loads: Sequence[Load] = (IDLE, PACED, UNPACED),
) -> Report:
    """Latency of StoreClient.match(), of a process of its own, under each load.

    keys: of one match; all are there. matches: how many, under each load. pause: seconds between two matches.
    """
    spec = pool("match")
    rows = [_under(endpoint, spec, load, keys, matches, pause) for load in loads]
    paced = [row["p99_us"] for row in rows if row["savers"] and row["rate_blocks_s"]]
    goals = [
        Goal("match p99 while sessions save", worst, _P99_US, "us", False) for worst in [max(paced)] if paced
    ]
    return Report("match", {"keys": keys, "matches": matches, "pause_s": pause}, rows, goals)


class Matcher:
    """StoreClient.match() in a process of its own, of `keys` keys that are all there, `matches` times with
    `pause` seconds between two."""

    def __init__(self, endpoint: str, spec: PoolSpec, keys: int, matches: int, pause: float) -> None:
        self._here, there = spawn.Pipe()
        arguments = (endpoint, spec, keys, matches, pause, there)
        self._process = spawn.Process(target=_match, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        """Waits until its keys are there."""
        self._process.start()
        try:
            receive(self._here)
        except BaseException:
            self._process.kill()
            raise
        return self

    def go(self) -> list[float]:
        """Seconds of each match."""
        self._here.send("go")
        seconds = receive(self._here)
        assert isinstance(seconds, list)
        return seconds

    def __exit__(self, *exc_info: object) -> None:
        self._process.join(5.0)
        self._process.kill()


def _under(
    endpoint: str, spec: PoolSpec, load: Load, keys: int, matches: int, pause: float
) -> dict[str, Any]:
    with (
        Matcher(endpoint, spec, keys, matches, pause) as matcher,
        Savers(endpoint, spec, load) as savers,
    ):
        savers.go()
        seconds = matcher.go()
        saved = savers.stop()
    return {
        "savers": load.sessions,
        "rate_blocks_s": load.rate,
        "batch": load.batch,
        "saved_blocks_s": round(sum(each.blocks / each.seconds for each in saved)),
        **latencies_us(seconds),
        "seconds": seconds,
    }


def _match(endpoint: str, spec: PoolSpec, keys: int, matches: int, pause: float, pipe: Connection) -> None:
    with StoreClient(endpoint, spec, engine_id="bench-match", credit_target=0) as client:
        client.wait_attached(ATTACH_SECONDS)
        wanted = random_keys(keys)
        client.reserve(keys)
        parent = b""
        for at in range(0, keys, MAX_BATCH):
            part = wanted[at : at + MAX_BATCH]
            client.seal(chain(part, client.take_credits(len(part)), parent))
            parent = part[-1]
        joined = b"".join(wanted)
        pipe.send("ready")
        pipe.recv()
        seconds = []
        for _ in range(matches):
            time.sleep(pause)
            started = time.perf_counter()
            match = client.match(joined)
            seconds.append(time.perf_counter() - started)
            if len(match.refs) != keys:
                raise KVSieveError(f"bench: {len(match.refs)} of {keys} keys matched")
            client.release(match.lease_ids, epoch=match.epoch)
        pipe.send(seconds)
