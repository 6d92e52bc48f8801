"""What a real store seldom does: a scripted one loses answers, stalls, refuses, splits small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.v1 import store_pb2 as pb
from kvsieve.v1 import store_pb2_grpc
from kvsieve_store.client import AsyncStoreClient, ClientState, Match, SealResult, SlotRef
from kvsieve_store.client.backoff import FIRST_SECONDS, LONGEST_SECONDS, Backoff
from kvsieve_store.errors import CapacityError, KVSieveError, UnavailableError
from tests.protocol.client_stores import SPEC, chain, entries, key


class ScriptedStore(store_pb2_grpc.StoreServicer):
    """Knows the keys in `known`, seals everything, and does what `before` says before each answer."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.limits = pb.Limits(max_match_keys=4, max_batch=3, max_lease_ms=9_000, max_credits=100)
        self.heartbeat_ms = 10_000
        self.known: set[bytes] = set()
        self.calls: list[Any] = []
        self.attached = 0
        self.renewed: list[list[int]] = []
        self.stream: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()
        self.before: dict[str, Callable[[Any], Any]] = {}
        self.answer: pb.MatchResponse | pb.SealResponse | None = None
        """Given to each Match or Seal instead of a true one."""

    async def Attach(self, requests: AsyncIterator[pb.AttachRequest], context: Any) -> Any:
        hello = await anext(aiter(requests))
        if "Attach" in self.before:
            await self.before["Attach"](context)
        self.attached += 1
        self.stream = stream = asyncio.Queue()
        yield pb.AttachResponse(
            welcome=pb.Welcome(
                session_id=bytes([self.attached] * 16),
                heartbeat_interval_ms=self.heartbeat_ms,
                limits=self.limits,
                credits=grant(*range(hello.hello.credit_target)),
            )
        )
        reader = asyncio.ensure_future(self._read(requests, stream))
        while (message := await stream.get()) is not None:
            yield message
        reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.AttachRequest], stream: Any) -> None:
        async for request in requests:
            self.renewed.append(sorted(request.heartbeat.renew_leases))
        stream.put_nowait(None)

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchResponse:
        await self._seen(request, context)
        if isinstance(self.answer, pb.MatchResponse):
            return self.answer
        keys = [request.keys[i : i + 32] for i in range(0, len(request.keys), 32)]
        count = next((i for i, k in enumerate(keys) if k not in self.known), len(keys))
        lease = len(self.calls) if count and request.lease_ms else 0
        return pb.MatchResponse(slots=range(count), generations=[1] * count, lease_id=lease)

    async def Seal(self, request: pb.SealRequest, context: Any) -> pb.SealResponse:
        await self._seen(request, context)
        if isinstance(self.answer, pb.SealResponse):
            return self.answer
        count = len(request.slots)
        return pb.SealResponse(status=[pb.SEAL_STATUS_SEALED] * count, credits=grant(*range(50, 50 + count)))

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        await self._seen(request, context)
        return pb.ReserveResponse(credits=grant(*range(request.count)))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        await self._seen(request, context)
        return pb.ReleaseResponse()

    async def _seen(self, request: Any, context: Any) -> None:
        self.calls.append(request)
        if hook := self.before.get(type(request).__name__.removesuffix("Request")):
            await hook(context)

    def of(self, kind: type) -> list[Any]:
        return [call for call in self.calls if isinstance(call, kind)]


def grant(*slots: int) -> pb.Credits:
    return pb.Credits(slots=slots, generations=[1] * len(slots))


async def stall(_: Any) -> None:
    await asyncio.Event().wait()


def abort(code: grpc.StatusCode, details: str) -> Callable[[Any], Any]:
    async def hook(context: Any) -> None:
        await context.abort(code, details)

    return hook


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(f"unix://{tmp_path}/s.sock")
    server = grpc.aio.server()
    store_pb2_grpc.add_StoreServicer_to_server(scripted, server)
    server.add_insecure_port(scripted.endpoint)
    await server.start()
    yield scripted
    await server.stop(0)


@asynccontextmanager
async def client(store: ScriptedStore, **options: Any) -> AsyncIterator[AsyncStoreClient]:
    """A started client."""
    options = {"engine_id": "test", "credit_target": 5} | options
    started = AsyncStoreClient(store.endpoint, SPEC, **options)
    started.start()
    try:
        yield started
    finally:
        await started.close()


async def test_a_match_goes_on_while_each_part_matches_whole(store: ScriptedStore) -> None:
    store.known = set(chain(10))
    async with client(store) as c:
        await c.wait_attached(20)
        match = await c.match(chain(20))
        assert len(match.refs) == 10
        assert match.lease_ids == (1, 2, 3)
        assert [len(call.keys) // 32 for call in store.of(pb.MatchRequest)] == [4, 4, 4]
        assert (await c.match(chain(4))).lease_ids == (4,)
        assert await c.match([key(99), *chain(19)]) == Match((), (), 1)
        assert len(store.calls) == 5


async def test_a_part_that_fails_gives_back_the_leases_before_it(store: ScriptedStore) -> None:
    store.known = set(chain(10))

    async def fail_second(context: Any) -> None:
        if len(store.calls) == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")

    store.before["Match"] = fail_second
    async with client(store) as c:
        await c.wait_attached(20)
        with pytest.raises(UnavailableError, match="busy"):
            await c.match(chain(10))
        await until(lambda: [list(call.lease_ids) for call in store.of(pb.ReleaseRequest)] == [[1]])


async def test_seals_and_releases_are_split_and_seals_keep_their_order(store: ScriptedStore) -> None:
    async with client(store, credit_target=8) as c:
        await c.wait_attached(20)
        refs = c.take_credits(8)
        first, second = await asyncio.gather(
            c.seal(entries(chain(5), refs[:5])), c.seal(entries(chain(3, start=5), refs[5:]))
        )
        assert first + second == [SealResult.SEALED] * 8
        seals = store.of(pb.SealRequest)
        assert [len(call.slots) for call in seals] == [3, 2, 3]
        assert b"".join(call.keys for call in seals) == b"".join(chain(8))
        assert seals[0].parents == bytes(32) + key(0) + key(1)
        assert c.credits == 8
        await c.release(range(1, 5), refs[:2])
        releases = store.of(pb.ReleaseRequest)
        assert [(len(call.lease_ids), len(call.slots)) for call in releases] == [(3, 2), (1, 0)]


async def test_leases_are_renewed_within_a_third_of_their_length(store: ScriptedStore) -> None:
    store.known = set(chain(1))
    async with client(store, lease_ms=100) as c:
        await c.wait_attached(20)
        match, dropped = await c.match(chain(1)), await c.match(chain(1))
        await c.release(dropped.lease_ids)
        await until(lambda: list(match.lease_ids) in store.renewed)
        assert store.renewed[-1] == list(match.lease_ids)


async def test_lease_length_is_cut_to_the_limit(store: ScriptedStore) -> None:
    async with client(store, lease_ms=60_000) as c:
        await c.wait_attached(20)
        await c.match(chain(1))
        assert store.of(pb.MatchRequest)[0].lease_ms == 9_000


async def test_credits_of_the_stream_are_added(store: ScriptedStore) -> None:
    async with client(store) as c:
        await c.wait_attached(20)
        store.stream.put_nowait(pb.AttachResponse(credits=grant(7, 8)))
        await until(lambda: c.credits == 7)
        assert c.take_credits(7)[5:] == [SlotRef(7, 1), SlotRef(8, 1)]


async def test_a_seal_without_an_answer_ends_the_session(store: ScriptedStore) -> None:
    """Whether it was done is unknown, and with it who holds the slot: only a new session can tell."""
    store.before["Seal"] = stall
    async with client(store, timeout=0.2) as c:
        await c.wait_attached(20)
        with pytest.raises(UnavailableError, match="Seal: no answer"):
            await c.seal(entries(chain(1), c.take_credits(1)))
        await until(lambda: c.attachment and c.attachment.epoch == 2)
        assert c.credits == 5


async def test_a_match_without_an_answer_keeps_the_session(store: ScriptedStore) -> None:
    store.before["Match"] = stall
    async with client(store, timeout=0.2) as c:
        epoch = (await c.wait_attached(20)).epoch
        with pytest.raises(UnavailableError, match="Match: no answer"):
            await c.match(chain(1))
        assert (await c.wait_attached(20)).epoch == epoch


async def test_calls_in_flight_fail_when_the_stream_ends(store: ScriptedStore) -> None:
    store.before["Match"] = store.before["Seal"] = stall
    async with client(store, timeout=60) as c:
        await c.wait_attached(20)
        calls = [
            asyncio.ensure_future(call)
            for call in (c.match(chain(1)), c.seal(entries(chain(1), c.take_credits(1))))
        ]
        await until(lambda: len(store.calls) == 2)
        store.stream.put_nowait(None)
        for call in calls:
            with pytest.raises(UnavailableError, match="session is over"):
                await call
        await until(lambda: c.attachment and c.attachment.epoch == 2)


async def test_an_unknown_session_is_left_at_once(store: ScriptedStore) -> None:
    store.before["Match"] = abort(grpc.StatusCode.NOT_FOUND, "session_id: unknown")
    async with client(store) as c:
        await c.wait_attached(20)
        with pytest.raises(UnavailableError, match="session_id: unknown"):
            await c.match(chain(1))
        await until(lambda: c.attachment and c.attachment.epoch == 2)


async def test_a_cancelled_call_by_the_store_is_an_error(store: ScriptedStore) -> None:
    store.before["Match"] = abort(grpc.StatusCode.CANCELLED, "shutting down")
    async with client(store) as c:
        await c.wait_attached(20)
        with pytest.raises(UnavailableError, match="shutting down"):
            await c.match(chain(1))


async def test_a_cancelled_attach_is_tried_again(store: ScriptedStore) -> None:
    store.before["Attach"] = abort(grpc.StatusCode.CANCELLED, "shutting down")
    async with client(store) as c:
        await until(lambda: c.error is not None)
        assert c.state == ClientState.CONNECTING
        assert "shutting down" in str(c.error)
        del store.before["Attach"]
        await c.wait_attached(20)


async def test_a_cancelled_waiter_leaves_no_lease(store: ScriptedStore) -> None:
    store.known = set(chain(1))
    go = asyncio.Event()

    async def hold(_: Any) -> None:
        await go.wait()

    store.before["Match"] = hold
    async with client(store) as c:
        await c.wait_attached(20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(c.match(chain(1)), 0.1)
        go.set()
        await until(lambda: [list(call.lease_ids) for call in store.of(pb.ReleaseRequest)] == [[1]])


async def test_credits_of_a_cancelled_seal_are_not_lost(store: ScriptedStore) -> None:
    go = asyncio.Event()

    async def hold(_: Any) -> None:
        await go.wait()

    store.before["Seal"] = hold
    async with client(store) as c:
        await c.wait_attached(20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(c.seal(entries(chain(1), c.take_credits(1))), 0.1)
        assert c.credits == 4
        go.set()
        await until(lambda: c.credits == 5)


async def test_a_store_that_does_not_welcome_is_tried_again(store: ScriptedStore) -> None:
    store.before["Attach"] = stall
    async with client(store, timeout=0.2) as c:
        with pytest.raises(UnavailableError, match=r"not attached after 0\.5 s: Attach: no answer"):
            await c.wait_attached(0.5)
        del store.before["Attach"]
        await c.wait_attached(20)


@pytest.mark.parametrize(
    ("code", "state", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ClientState.REFUSED, CapacityError),
        (grpc.StatusCode.UNAVAILABLE, ClientState.CONNECTING, UnavailableError),
        (grpc.StatusCode.INTERNAL, ClientState.CONNECTING, KVSieveError),
    ],
)
async def test_what_a_refusal_leads_to(
    store: ScriptedStore, code: grpc.StatusCode, state: ClientState, kind: type[KVSieveError]
) -> None:
    store.before["Attach"] = abort(code, "not today")
    async with client(store) as c:
        await until(lambda: c.error is not None)
        assert c.state == state
        assert type(c.error) is kind
        assert "not today" in str(c.error)


@pytest.mark.parametrize(
    "answer",
    [
        pb.MatchResponse(slots=range(3), generations=[1] * 3),
        pb.MatchResponse(slots=range(2), generations=[1]),
        pb.MatchResponse(slots=[1], generations=[1] * 2, lease_id=7),
        pb.SealResponse(status=[1]),
        pb.SealResponse(status=[1, 1, 1], lease_id=7),
        pb.SealResponse(status=[1, 0]),
        pb.SealResponse(status=[1, 3]),
        pb.SealResponse(status=[-1, 2**31 - 1], lease_id=7),
    ],
    ids=lambda answer: str(answer).replace("\n", " "),
)
async def test_an_answer_that_makes_no_sense_ends_the_session(
    store: ScriptedStore, answer: pb.MatchResponse | pb.SealResponse
) -> None:
    async with client(store) as c:
        await c.wait_attached(20)
        store.answer, two = answer, entries(chain(2), c.take_credits(2))
        is_match = isinstance(answer, pb.MatchResponse)
        with pytest.raises(UnavailableError, match="answers what makes no sense"):
            await (c.match(chain(2)) if is_match else c.seal(two, hold=True))
        store.answer = None
        await until(lambda: store.attached == 2 and c.state == ClientState.ATTACHED)
        store.known = set(chain(2))
        assert len((await c.match(chain(2))).refs) == 2


async def test_draining_stops_new_work_and_lets_the_rest_finish(store: ScriptedStore) -> None:
    changes: list[str] = []
    async with client(store, on_change=changes.append) as c:
        await c.wait_attached(20)
        refs = c.take_credits(2)
        store.stream.put_nowait(pb.AttachResponse(draining=pb.Draining(deadline_ms=1000)))
        await until(lambda: c.state == ClientState.DRAINING)
        assert c.take_credits(1) == []
        with pytest.raises(UnavailableError, match="draining"):
            await c.match(chain(1))
        assert await c.seal(entries(chain(1), refs)) == [SealResult.SEALED]
        await c.release(refs=refs[1:])
        store.stream.put_nowait(None)
        await until(lambda: changes[-2:] == ["connecting", "attached"])
    assert changes == ["attached", "draining", "connecting", "attached", "closed"]


async def test_an_on_change_that_raises_harms_nothing(store: ScriptedStore) -> None:
    def fail(_: str) -> None:
        raise ValueError("on purpose")

    async with client(store, on_change=fail) as c:
        await c.wait_attached(20)
        await c.match(chain(1))


@given(seed=st.integers(), tries=st.integers(1, 30))
def test_backoff_doubles_to_its_limit(seed: int, tries: int) -> None:
    backoff = Backoff(random.Random(seed))
    for round_ in range(2):
        for n in range(tries):
            full = min(FIRST_SECONDS * 2**n, LONGEST_SECONDS)
            assert full / 2 <= backoff.wait() <= full, round_
        backoff.reset()
