"""The store as a process: logging, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import signal

from kvsieve_store.errors import KVSieveError
from kvsieve_store.server import logs
from kvsieve_store.server.store import Store
from kvsieve_store.settings import StoreSettings

_log = logging.getLogger(__name__)


def run(settings: StoreSettings) -> int:
    """Serves until SIGTERM, SIGINT or a drain. Exit code: 0, or 1 when the store could not start."""
    logs.configure(settings.log_level, settings.log_format)
    return asyncio.run(_serve(settings))


async def _serve(settings: StoreSettings) -> int:
    store = Store(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, store.request_stop)
    try:
        async with store:
            await store.wait_until_stop()
    except KVSieveError as error:
        _log.error("%s", error)
        return 1
    return 0
