"""Asks every engine's /health, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from kvsieve_pd.proxy.instances import Instance, Pool
from kvsieve_pd.proxy.settings import ProxySettings

_log = logging.getLogger(__name__)


@asynccontextmanager
async def checked(
    pools: Sequence[Pool], session: aiohttp.ClientSession, settings: ProxySettings
) -> AsyncIterator[None]:
    """Checks run meanwhile, one task per engine."""
    tasks = [
        asyncio.create_task(_watch(pool, instance, session, settings))
        for pool in pools
        for instance in pool.instances
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    pool: Pool, instance: Instance, session: aiohttp.ClientSession, settings: ProxySettings
) -> None:
    while True:
        was_up = instance.up
        reason = await _ask(instance.url, session, settings.health_timeout)
        pool.checked(instance, reason is None)
        if instance.up and not was_up:
            _log.info("%s engine %s is back", pool.role, instance.url)
        elif was_up and not instance.up:
            _log.warning("%s engine %s gets no requests: %s", pool.role, instance.url, reason)
        await asyncio.sleep(settings.health_interval)


async def _ask(url: str, session: aiohttp.ClientSession, seconds: float) -> str | None:
    """None if it is well, else what is wrong."""
    with contextlib.suppress(TimeoutError):
        try:
            async with asyncio.timeout(seconds), session.get(f"{url}/health") as response:
                return None if response.status == 200 else f"/health answers {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            if not isinstance(error, TimeoutError):
                return str(error) or type(error).__name__
    return f"/health does not answer within {seconds:g} s"
