"""How many blocks a second go through reserve and seal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvsieve_store.bench.blocks import pool
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.saving import Load, Savers
from kvsieve_store.protocol.spec import PoolSpec

LOADS = (
    Load(sessions=1, batch=256),
    Load(sessions=4, batch=256),
    Load(sessions=1, batch=1024),
    Load(sessions=1, batch=256, credits=512),
    Load(sessions=4, batch=256, credits=512),
)

_BLOCKS_PER_SECOND = 20_000.0


def measure(endpoint: str, *, seconds: float = 5.0, loads: Sequence[Load] = LOADS) -> Report:
    """Blocks/s of all sessions together, as fast as they can.

    seconds: how long each load runs; blocks are new, so that a full store evicts as many as it seals.
    """
    spec = pool("seal")
    rows = [_under(endpoint, spec, load, seconds) for load in loads]
    goals = [
        Goal(f"reserve + seal, sessions: {row['sessions']}", row["blocks_s"], _BLOCKS_PER_SECOND, "blocks/s")
        for row in rows
        if not row["credits"] and row["batch"] == LOADS[0].batch
    ]
    return Report("seal", {"seconds": seconds}, rows, goals)


def _under(endpoint: str, spec: PoolSpec, load: Load, seconds: float) -> dict[str, Any]:
    with Savers(endpoint, spec, load) as savers:
        savers.go()
        time.sleep(seconds)
        saved = savers.stop()
    return {
        "sessions": load.sessions,
        "batch": load.batch,
        "credits": load.credits,
        "blocks_s": round(sum(each.blocks / each.seconds for each in saved)),
        "short_batches": sum(each.short_batches for each in saved),
    }
