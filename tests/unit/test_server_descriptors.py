"""File descriptors of the store process: the limit, and what the log says when they run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from typing import Any

import pytest

from kvsieve_store.server import descriptors


@pytest.mark.parametrize(
    ("limits", "warns"),
    [((256, 65_536), False), ((256, 1024), True), ((-1, -1), False)],
)
def test_the_soft_limit_becomes_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limits: tuple[int, int], warns: bool
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: asked.append(new))
    descriptors.raise_limit()
    assert asked == ([] if limits[0] == limits[1] else [(limits[1], limits[1])])
    assert ("at most 1024 file descriptors" in caplog.text) == warns


def test_accept_errors_are_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(descriptors.exception_handler(lambda: now[0]))
    context: dict[str, Any] = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
        "socket": None,
    }
    for now[0] in (0.0, 1.0, 9.9, 10.0, 10.1):
        loop.call_exception_handler(context)
    assert [record.getMessage() for record in caplog.records] == [
        "http: can't accept connections: Too many open files"
    ] * 2
    loop.call_exception_handler({"message": "another fault", "exception": ValueError()})
    assert (caplog.records[-1].levelno, caplog.records[-1].message) == (logging.ERROR, "another fault")
    loop.close()
