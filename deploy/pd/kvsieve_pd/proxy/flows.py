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
        async with contextlib.AsyncExitStack() as stack:
            try:
                body = await self._after_prefill(call, stack)
            except Rejected as rejected:
                yield rejected.answer
                return
            yield await stack.enter_async_context(self._ask(self._decode, call, body))

    async def _after_prefill(self, call: Call, stack: contextlib.AsyncExitStack) -> Body:
        """What decode is asked, once it may be. stack: ends what runs beside it. Raises Rejected."""
        if params.prompt_length(call.body) < self._settings.short_prompt or not self._prefill.instances:
            return call.body
        try:
            first = self._prefill.choose()
        except NoInstance as error:
            self._goes_on_without(call, error)
            return call.body
        if self._settings.flow == "overlapped" and first.store:
            call.flow = "overlapped"
            await stack.enter_async_context(_beside(self._run_prefill(call, first, retry=False)))
            return params.overlapped_body(call.body, first.store, self._settings.wait_ms)
        call.flow = "sequential"
        return params.decode_body(call.body, await self._run_prefill(call, first, retry=True))

    async def _run_prefill(self, call: Call, first: Instance, *, retry: bool) -> Body:
        """Prefill's answer, {} if there is none. Raises Rejected (with retry).

        retry: on other engines too. Else decode waits for the first one's store already, and nobody else's.
        """
        started = time.monotonic()
        body = params.prefill_body(call.body)
        try:
            async with self._ask(self._prefill, call, body, first=first, retry=retry) as answer:
                said = answer.json()
                if answer.status == 200:
                    self._metrics.prefill_seconds.observe(time.monotonic() - started)
                    answer.instance.store = params.store_of(said) or answer.instance.store
                    return said
                if retry:
                    raise Rejected(answer)
                return {}
        except ProxyError as error:
            self._goes_on_without(call, error)
            return {}

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


@asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[None]:
    """Runs a coroutine meanwhile; what is left of it on the way out is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
