"""The store as a process: logging, signals, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Coroutine

from kvsieve_store.errors import KVSieveError
from kvsieve_store.server import descriptors, logs
from kvsieve_store.server.store import Store
from kvsieve_store.settings import StoreSettings

_log = logging.getLogger(__name__)


Companion = Callable[[Store], Coroutine[None, None, None]]
"""Runs beside a store that has started, and is cancelled when the store ends: the face on a terminal."""


def run(settings: StoreSettings, companion: Companion | None = None) -> int:
    """Serves until SIGTERM, SIGINT or a drain. Exit code: 0, or 1 when the store could not start."""
    logs.configure(settings.log_level, settings.log_format)
    descriptors.raise_limit()
    return asyncio.run(_serve(settings, companion))


async def _serve(settings: StoreSettings, companion: Companion | None) -> int:
    store = Store(settings)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(descriptors.exception_handler(loop.time))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, store.request_stop)
    try:
        async with store:
            # What is there now stays: the collector need not walk through it during calls.
            gc.freeze()
            beside = asyncio.create_task(companion(store)) if companion else None
            try:
                await store.wait_until_stop()
            finally:
                if beside:
                    beside.cancel()
                    await asyncio.wait([beside])
    except KVSieveError as error:
        _log.error("%s", error)
        return 1
    return 0
