"""One request to one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from kvsieve_pd.proxy.errors import UpstreamFailed
from kvsieve_pd.proxy.instances import Instance, Pool
from kvsieve_pd.proxy.params import Body
from kvsieve_pd.proxy.settings import ProxySettings

_RETRIED = frozenset({500, 502, 503, 504})
"""Answers after which another engine may do better."""


class Answer:
    """What an engine says: its status and content type, and its bytes, all at once or as they come."""

    def __init__(self, instance: Instance, response: aiohttp.ClientResponse, settings: ProxySettings) -> None:
        self.instance = instance
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.first = b""
        """The whole body, or the first piece of it when `streamed`."""
        self._response = response
        self._settings = settings

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def rest(self) -> AsyncIterator[bytes]:
        """What comes after the first piece of a stream. Raises UpstreamFailed when it breaks off."""
        while True:
            try:
                async with asyncio.timeout(self._settings.idle_timeout):
                    piece = await self._response.content.readany()
            except TimeoutError:
                raise UpstreamFailed(
                    f"{self.instance.url} sent nothing for {self._settings.idle_timeout:g} s", timed_out=True
                ) from None
            except (aiohttp.ClientError, OSError) as error:
                raise UpstreamFailed(f"{self.instance.url} broke off its answer: {_say(error)}") from None
            if not piece:
                return
            yield piece

    def json(self) -> Body:
        """The body, if it is a JSON object; else {}."""
        try:
            value: Any = json.loads(self.first)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Upstream:
    """Sends requests to engines. Every failure to answer is counted against the engine."""

    def __init__(self, session: aiohttp.ClientSession, settings: ProxySettings) -> None:
        self._session = session
        self._settings = settings

    @asynccontextmanager
    async def ask(
        self,
        pool: Pool,
        instance: Instance,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        seconds: float,
    ) -> AsyncIterator[Answer]:
        """POST; yields when the whole answer is there, or the first piece of a stream.

        seconds: until then. Raises UpstreamFailed: not reached, broken off, too late, or a status of 5xx.
        """
        # Leaving the stack closes the connection unless all was read: an engine learns that nobody listens.
        async with AsyncExitStack() as stack:
            stack.enter_context(pool.in_use(instance))
            try:
                async with asyncio.timeout(seconds) as limit:
                    call = self._session.post(instance.url + path, json=body, headers=headers)
                    response = await stack.enter_async_context(call)
                    answer = Answer(instance, response, self._settings)
                    if answer.streamed and answer.status == 200:
                        answer.first = await response.content.readany()
                        if not answer.first:
                            raise aiohttp.ClientPayloadError("the stream ended before its first event")
                    else:
                        answer.first = await response.read()
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                pool.failed(instance)
                if limit.expired():
                    text = f"{instance.url} did not answer within {seconds:g} s"
                    raise UpstreamFailed(text, timed_out=True) from None
                raise UpstreamFailed(f"{instance.url} did not answer: {_say(error)}") from None
            if answer.status in _RETRIED:
                pool.failed(instance)
                raise UpstreamFailed(f"{instance.url} answered {answer.status}: {_excerpt(answer.first)}")
            pool.succeeded(instance)
            try:
                yield answer
            except UpstreamFailed:
                pool.failed(instance)
                raise


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _excerpt(body: bytes) -> str:
    return body[:300].decode(errors="replace").strip() or "(empty)"
