"""What the store's own memory grows to with many blocks in its index."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvsieve_store.bench.blocks import SMALL_SLOT, pool
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.saving import Load, Savers
from kvsieve_store.bench.store import TemporaryStore
from kvsieve_store.client import AdminClient
from kvsieve_store.protocol.layout import ExtentLayout

_EXTENT = 64 << 20
_LIMIT_MB = 200.0
_POLL_SECONDS = 0.2


def measure(*, blocks: int = 1_000_000) -> Report:
    """Memory of the store process that is not shared memory, before the first block and with `blocks` sealed.

    Slots are as small as they can be and never touched, so that the arena costs nothing here.
    """
    extents = -(-blocks // ExtentLayout.of(_EXTENT, SMALL_SLOT).slots_per_extent) + 1
    flags = ("--pool-size", str(extents * _EXTENT), "--extent-size", str(_EXTENT), "--no-prefault")
    spec = pool("memory")
    with TemporaryStore(*flags) as store, AdminClient(store.endpoint) as admin:
        rows = [_memory(store.pid, 0)]
        load = Load(sessions=1, batch=min(1024, blocks), credits=2048)
        with Savers(store.endpoint, spec, load) as savers:
            savers.go()
            while admin.status().sealed_blocks < blocks:
                time.sleep(_POLL_SECONDS)
            savers.stop()
        rows.append(_memory(store.pid, admin.status().sealed_blocks))
    goal = Goal("store memory beyond the arena", rows[-1]["rss_mb"], _LIMIT_MB, "MB", at_least=False)
    return Report("memory", {"blocks": blocks, "slot_bytes": SMALL_SLOT}, rows, [goal])


def _memory(pid: int, blocks: int) -> dict[str, Any]:
    """Megabytes (10^6 bytes) from /proc/PID/status: rss is all but shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous, files = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "RssFile"))
    return {
        "blocks": blocks,
        "anonymous_mb": round(anonymous, 1),
        "files_mb": round(files, 1),
        "rss_mb": round(anonymous + files, 1),
    }
