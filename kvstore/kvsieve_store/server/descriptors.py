"""File descriptors: as many as the system allows, and few words in the log when they run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_ENOUGH = 4096
_SECONDS_BETWEEN_LINES = 10.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> None:
    """Lifts the soft limit to the hard one; warns where that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:
            _log.warning("can't raise the limit of file descriptors from %d: %s", soft, error)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH:
        _log.warning(
            "at most %d file descriptors: engines take two or more each; raise the limit to %d (ulimit -n)",
            soft,
            _ENOUGH,
        )


def exception_handler(
    now: Callable[[], float],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler for an event loop that logs connections it can't accept once in 10 s, the rest as ever.

    now: monotonic seconds. asyncio reports each attempt, which makes a hundred tracebacks a second.
    """
    silent_until = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal silent_until
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context):
            loop.default_exception_handler(context)
        elif now() >= silent_until:
            silent_until = now() + _SECONDS_BETWEEN_LINES
            _log.error("http: can't accept connections: %s", error.strerror)

    return handle
