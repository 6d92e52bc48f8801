"""in_thread(): a call that a thread is in is never left behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvsieve_store.peers.threads import in_thread


def test_results_and_errors_pass_through() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            assert await in_thread(threads, lambda: 7) == 7
            with pytest.raises(ValueError, match="no"):
                await in_thread(threads, fail)

    asyncio.run(run())


@pytest.mark.parametrize("cancels", [1, 2, 5])
def test_however_often_it_is_cancelled_the_thread_is_done_first(cancels: int) -> None:
    ends, go = [], threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            done = False

            def call() -> None:
                nonlocal done
                go.wait()
                done = True

            task = asyncio.create_task(in_thread(threads, call, lambda: ends.append(1)))
            for _ in range(cancels):
                await asyncio.sleep(0.02)
                task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert done

    asyncio.run(run())
    assert ends == [1]  # told once


def test_the_end_of_the_call_is_asked_for() -> None:
    stop = threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(in_thread(threads, stop.wait, stop.set))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_an_error_after_the_cancel_is_not_its_outcome() -> None:
    go = threading.Event()

    def call() -> None:
        go.wait()
        raise ValueError("too late")

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(in_thread(threads, call, go.set))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
