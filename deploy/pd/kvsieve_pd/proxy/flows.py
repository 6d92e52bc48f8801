"""A request's way through both kinds of engines.

sequential: prefill, then decode with what prefill's answer says about the transfer. overlapped: both at once.
Prefill may fail in both, on every engine: then decode computes the prompt. A request fails with decode only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kvsieve_pd.proxy import params
from kvsieve_pd.proxy.errors import NoInstance, ProxyError, UpstreamFailed
from kvsieve_pd.proxy.instances import Instance, Pool
from kvsieve_pd.proxy.metrics import Metrics
from kvsieve_pd.proxy.params import PARAMS, Body
from kvsieve_pd.proxy.settings import ProxySettings
from kvsieve_pd.proxy.upstream import Answer, Upstream

_log = logging.getLogger(__name__)


class Call:
    """One request of a client. flow: how it went; known once an answer is there."""

    def __init__(self, path: str, body: Body, headers: Mapping[str, str]) -> None:
        self.path = path
        self.body = body
        self.headers = headers
        self.flow = "direct"


class Rejected(Exception):
    """An engine refused the request itself: the client gets its answer as it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Flows:
    """Both flows, over two pools."""

    def __init__(
        self, prefill: Pool, decode: Pool, upstream: Upstream, settings: ProxySettings, metrics: Metrics
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._upstream = upstream
        self._settings = settings
        self._metrics = metrics

    @asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """The client's answer; what still runs for it ends on the way out. Raises ProxyError."""
        own = call.body.get(PARAMS)
        if isinstance(own, dict) and (own.get("do_remote_decode") or own.get("do_remote_prefill")):
            # Another proxy runs the flow, and this one is an engine to it.
            pool = self._prefill if own.get("do_remote_decode") and self._prefill.instances else self._decode
            call.flow = "passed"
            async with self._ask(pool, call, call.body) as answer:
                yield answer
            return
        if params.prompt_length(call.body) < self._settings.short_prompt or not self._prefill.instances:
            body = call.body
        else:
            try:
                first = self._prefill.choose()
                if self._settings.flow == "overlapped" and first.store:
                    async with self._overlapped(call, first) as answer:
                        yield answer
                    return
                call.flow = "sequential"
                body = params.decode_body(call.body, await self._run_prefill(call, first, retry=True))
            except Rejected as rejected:
                yield rejected.answer
                return
            except ProxyError as error:
                if call.flow == "overlapped":
                    raise
                self._goes_on_without(call, error)
                body = call.body
        async with self._ask(self._decode, call, body) as answer:
            yield answer

    @asynccontextmanager
    async def _overlapped(self, call: Call, first: Instance) -> AsyncIterator[Answer]:
        """Decode's answer; prefill runs beside it. Raises ProxyError.

        When prefill fails before decode's first byte, another pair of requests begins: with another prefill
        engine, or with none, and then decode takes what there is and waits for nothing.
        """
        call.flow = "overlapped"
        instance, tried = first, [first]
        while True:
            async with self._side_by_side(call, instance) as answer:
                if answer is not None:
                    yield answer
                    return
            others = [i for i in self._prefill.up if i.store and i not in tried]
            if not others or len(tried) >= self._settings.attempts:
                break
            instance = self._prefill.choose([i for i in self._prefill.instances if i not in others])
            tried.append(instance)
            self._metrics.retries.labels(self._prefill.role).inc()
        self._metrics.without_prefill.inc()
        body = params.overlapped_body(call.body, instance.store, 0)
        async with self._ask(self._decode, call, body) as answer:
            yield answer

    @asynccontextmanager
    async def _side_by_side(self, call: Call, instance: Instance) -> AsyncIterator[Answer | None]:
        """Decode's answer, or None when prefill has failed before. What is left ends on the way out."""
        body = params.overlapped_body(call.body, instance.store, self._settings.wait_ms)
        async with contextlib.AsyncExitStack() as stack:
            prefill = asyncio.create_task(self._run_prefill(call, instance, retry=False))
            stack.push_async_callback(_end, prefill)
            asked = stack.enter_async_context(self._ask(self._decode, call, body))
            decode = asyncio.create_task(asked)
            stack.push_async_callback(_end, decode)
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            failure = prefill.exception() if prefill.done() else None
            if isinstance(failure, ProxyError) and not decode.done():
                _log.warning("%s: prefill failed beside decode: %s", call.headers["X-Request-Id"], failure)
                yield None
            else:
                yield await decode

    async def _run_prefill(self, call: Call, first: Instance, *, retry: bool) -> Body:
        """Prefill's answer. retry: on other engines, too. Raises Rejected (with retry), ProxyError."""
        started = time.monotonic()
        body = params.prefill_body(call.body)
        async with self._ask(self._prefill, call, body, first=first, retry=retry) as answer:
            said = answer.json()
            if answer.status == 200:
                self._metrics.prefill_seconds.observe(time.monotonic() - started)
                answer.instance.store = params.store_of(said) or answer.instance.store
            elif retry:
                raise Rejected(answer)
            return said

    def _goes_on_without(self, call: Call, error: ProxyError) -> None:
        self._metrics.without_prefill.inc()
        _log.warning("%s: decode computes the prompt: %s", call.headers.get("X-Request-Id", "-"), error)

    @asynccontextmanager
    async def _ask(
        self, pool: Pool, call: Call, body: Body, *, first: Instance | None = None, retry: bool = True
    ) -> AsyncIterator[Answer]:
        """An answer; by another engine when one fails before its first byte. Raises ProxyError."""
        settings = self._settings
        seconds = settings.prefill_timeout if pool is self._prefill else settings.first_byte_timeout
        instance = first or pool.choose()
        tried = [instance]
        async with contextlib.AsyncExitStack() as stack:
            while True:
                try:
                    asked = self._upstream.ask(pool, instance, call.path, body, call.headers, seconds)
                    answer = await stack.enter_async_context(asked)
                    break
                except UpstreamFailed as failure:
                    if not retry or len(tried) >= settings.attempts or failure.timed_out:
                        raise
                    try:
                        instance = pool.choose(tried)
                    except NoInstance:
                        raise failure from None
                    tried.append(instance)
                    self._metrics.retries.labels(pool.role).inc()
                    _log.warning("%s engine failed, trying another one: %s", pool.role, failure)
            yield answer


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels it, unless it is done, and waits."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
