"""The demo's own store: a `kvsieve serve` process, and the few numbers of it that the demo shows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvsieve.v1 import admin_pb2 as pb
from kvsieve_connector.demo.processes import Child
from kvsieve_store.client import AdminClient
from kvsieve_store.errors import KVSieveError, UnavailableError

_POOL_MIB = 512
_START_SECONDS = 60.0


class DemoStore:
    """A store on a socket in `folder`."""

    def __init__(self, folder: Path, name: str = "store", flags: Sequence[str] = ()) -> None:
        """Starts it; start() waits. name: of its log, and for messages. flags: more of `kvsieve serve`."""
        self.endpoint = f"unix://{folder / name}.sock"
        command = [sys.executable, "-m", "kvsieve_store.cli.main", "serve", "--listen", self.endpoint]
        command += [
            "--http",
            "",
            "--pool-size",
            f"{_POOL_MIB}MiB",
            "--shm-dir",
            str(_shm_dir(folder)),
            *flags,
        ]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSIEVE_")}
        self.child = Child(name, command, folder / f"{name}.log", environ)
        self._admin = AdminClient(self.endpoint)

    def start(self) -> None:
        """Waits until it serves engines. Raises DemoError."""
        self.child.wait_until(self._ready, _START_SECONDS)

    def pool(self) -> pb.PoolInfo | None:
        """The engine's pool; None before it has attached. It is the only one of this store."""
        return next(iter(self._admin.list_pools().pools), None)

    def sealed_blocks(self) -> int:
        """Blocks that the store has; 0 when it can't be asked."""
        try:
            pool = self.pool()
        except KVSieveError:
            return 0
        return pool.sealed_blocks if pool else 0

    def _ready(self) -> bool:
        try:
            return self._admin.status().state == "ready"
        except UnavailableError:
            return False


def _shm_dir(folder: Path) -> Path:
    """/dev/shm, or `folder` where that is small, as in many containers: slower, but it works."""
    return Path("/dev/shm") if shutil.disk_usage("/dev/shm").free > 2 * _POOL_MIB << 20 else folder
