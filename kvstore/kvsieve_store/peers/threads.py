"""Calls that block, in threads, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(threads: Executor, call: Callable[[], T], end: Callable[[], None] | None = None) -> T:
    """What the call returns or raises. It is never left behind: who is cancelled, however often, is so once
    the thread is done, and memory that it touches is not reused before.

    end: makes the call end soon; called, in a thread, when the waiter is cancelled.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(threads, call)
    pending: set[asyncio.Future[Any]] = {future}
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            if cancelled is None and end is not None:
                pending.add(loop.run_in_executor(None, end))
            cancelled = error
            pending = {each for each in pending if not each.done()}
    if cancelled is not None:
        future.exception()  # seen: nobody hears of it any more
        raise cancelled
    return future.result()
