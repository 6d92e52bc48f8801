"""The store's clock: what a process that stood still does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.arena import Arena
from kvsieve_store.protocol.spec import Plane, PoolSpec
from kvsieve_store.server.clock import Clock
from kvsieve_store.server.core import Core
from kvsieve_store.settings import StoreSettings

EXTENT = 1 << 20
SPEC = PoolSpec("pool", "model", "bfloat16", 16, "sha256", "", "LBHNC", 1, (Plane("main", (65_536, 65_536)),))


class Time:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def core(time: Time, tmp_path: Path) -> Iterator[Core]:
    """Of a ready store with a session timeout of 10 s."""
    settings = StoreSettings(
        pool_size=EXTENT, extent_size=EXTENT, segment_size=EXTENT, listen=[f"unix://{tmp_path}/s"]
    )
    arena = Arena.create(tmp_path, EXTENT, EXTENT, EXTENT, store="unix:///s")
    core = Core(settings, arena, asyncio.Event(), time)
    core.phase = "ready"
    yield core
    core.close()
    arena.close()


def attach(core: Core) -> bytes:
    hello = pb.Hello(pool=SPEC.to_proto(), protocol_version=1, engine_id="engine", credit_target=1, pid=1)
    return core.open_session(hello).session_id


def test_ticks_in_time_lose_nothing(time: Time) -> None:
    clock = Clock(time)
    for _ in range(10):
        time.seconds += 1.9
        assert clock.now() == pytest.approx(time.seconds)
        assert clock.tick() == 0
    assert clock.now() == pytest.approx(119.0)


def test_a_late_tick_counts_for_two_seconds_and_time_never_goes_back(time: Time) -> None:
    clock = Clock(time)
    time.seconds += 60
    assert clock.now() == 102
    assert clock.tick() == 58
    assert clock.now() == 102
    time.seconds += 1
    assert clock.now() == 103
    assert clock.tick() == 0


def test_a_pause_ends_no_session_whose_heartbeats_wait(core: Core, time: Time) -> None:
    session_id = attach(core)
    time.seconds += 3600
    core.tick()
    core.state.heartbeat(session_id, [], core.now())
    time.seconds += 1
    core.tick()
    assert [session.state for session in core.state.list_sessions(core.now())] == ["attached"]


def test_silence_after_a_pause_ends_a_session_all_the_same(core: Core, time: Time) -> None:
    attach(core)
    time.seconds += 3600
    for _ in range(12):
        core.tick()
        time.seconds += 1
    assert core.state.list_sessions(core.now()) == []


def test_uptime_counts_the_pause(core: Core, time: Time) -> None:
    time.seconds += 3600
    assert core.uptime == 3600
