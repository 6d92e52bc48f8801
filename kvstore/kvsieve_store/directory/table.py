"""Table: what lies where in Redis or Valkey, by redis-py. docs/directory.md says it for people.

kvsieve:1:b:<pool id, 16 bytes><key, 32 bytes>   set of the numbers of stores that hold the block
kvsieve:1:s:<number>                             address of a store that lives
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from kvsieve_store.directory.announcements import Change
from kvsieve_store.errors import SettingsError

HOLDERS = 8
"""Most holders of a block that are looked at; more are chosen from at random."""

_BLOCK = b"kvsieve:1:b:"
_STORE = b"kvsieve:1:s:"
_FAMILY_BYTES = 16
_MAX_ADDRESS = 256
_MAX_DIGITS = 20
"""Of a store's number; int() refuses a text of thousands."""


class TableError(Exception):
    """A call that failed, for whatever reason. readable: only writing is impossible."""

    def __init__(self, reason: str, readable: bool = False) -> None:
        super().__init__(reason)
        self.readable = readable


def shown(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def block_name(family_id: bytes, key: bytes) -> bytes:
    return _BLOCK + family_id[:_FAMILY_BYTES] + key


def store_name(store: int) -> bytes:
    return _STORE + str(store).encode()


class Table:
    """Lives in one event loop. Every method raises TableError, within `seconds`, and nothing else."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises SettingsError for a URL that can't be used."""
        try:
            from redis import exceptions
            from redis.asyncio import Redis, RedisCluster
            from redis.asyncio.retry import Retry
            from redis.backoff import ExponentialWithJitterBackoff
        except ImportError:
            raise SettingsError(
                "directory: a directory in Redis needs the Python package redis; pip install 'kvsieve[redis]'"
            ) from None
        self._write_errors = (exceptions.OutOfMemoryError, exceptions.ReadOnlyError)
        kind: Any = RedisCluster if "+cluster" in url.partition("://")[0] else Redis
        retry = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), 2)
        try:
            self._redis = kind.from_url(
                url.replace("+cluster", "", 1), retry=retry, socket_connect_timeout=2.0, socket_timeout=5.0
            )
        except Exception as error:
            raise SettingsError(f"directory: {shown(url)}: {error}") from None

    async def beat(self, store: int, address: str, ttl: int, seconds: float) -> bool:
        """Says for `ttl` seconds that the store lives, unless its address is empty. Returns whether the
        directory knew."""
        calls: list[tuple[Any, ...]] = [("GET", store_name(store))]
        if address:
            calls.append(("SET", store_name(store), address, "EX", ttl))
        known, *_ = await self._call(calls, seconds)
        return known is not None

    async def leave(self, store: int, seconds: float) -> None:
        """The store is about to end."""
        await self._call([("DEL", store_name(store))], seconds)

    async def tell(self, changes: Sequence[Change], ttl: int, seconds: float) -> None:
        """In their order. ttl: seconds that a block is known after the last word that somebody holds it."""
        calls: list[tuple[Any, ...]] = []
        for held, store, family_id, key in changes:
            name = block_name(family_id, key)
            if held:
                calls += (("SADD", name, store), ("EXPIRE", name, ttl))
            else:
                calls.append(("SREM", name, store))
        await self._call(calls, seconds)

    async def holders(self, family_id: bytes, keys: Sequence[bytes], seconds: float) -> list[list[int]]:
        """Of each key the numbers of up to HOLDERS stores."""
        calls = [("SRANDMEMBER", block_name(family_id, key), HOLDERS) for key in keys]
        found = await self._call(calls, seconds)
        return [
            [int(number) for number in numbers if number.isdigit() and len(number) < _MAX_DIGITS]
            for numbers in found
        ]

    async def addresses(self, stores: Sequence[int], seconds: float) -> list[str]:
        """Of each store; empty when it does not live."""
        found = await self._call([("GET", store_name(store)) for store in stores], seconds)
        return [(address or b"")[:_MAX_ADDRESS].decode(errors="replace") for address in found]

    async def close(self) -> None:
        with suppress(Exception):
            await self._redis.aclose()

    async def _call(self, calls: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """One round trip (a node, in a cluster); commands on one key stay in order."""
        async with self._mapped(seconds):
            pipe = self._redis.pipeline(transaction=False)
            for call in calls:
                pipe.execute_command(*call)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        return answers

    @asynccontextmanager
    async def _mapped(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                yield
        except TimeoutError:
            raise TableError("no answer in time") from None
        except (
            Exception
        ) as error:  # of redis-py, of sockets, of the resolver: whatever it is, it is not there
            text = f"{type(error).__name__}: {error}"
            raise TableError(text, isinstance(error, self._write_errors)) from None
