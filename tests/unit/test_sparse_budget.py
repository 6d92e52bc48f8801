"""Slots before requests: who may start, what the store is asked for, and what is given back."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve_connector.sparse.budget import SLACK, SlotBudget
from kvsieve_connector.sparse.hosts import Host, Place
from kvsieve_store.client import SlotRef


class Client:
    """credits: as the test says. asked: reservations that the test answers."""

    def __init__(self, credits: int) -> None:
        self.credits = credits
        self.asked: list[tuple[int, Future[int]]] = []

    def reserve_async(self, count: int) -> Future[int]:
        self.asked.append((count, Future()))
        return self.asked[-1][1]

    def take_credits(self, count: int) -> list[SlotRef]:
        self.credits -= count
        return [SlotRef(i, 1) for i in range(count)]

    def grant(self, count: int) -> None:
        """Answers the last reservation."""
        self.credits += count
        self.asked[-1][1].set_result(count)


class Scene:
    def __init__(self, credits: int) -> None:
        self.now = 0.0
        self.client: Any = Client(credits)
        self.budget = SlotBudget(lambda: self.now, random.Random(1))

    def admits(self, name: str, need: int, owed: int = 0) -> bool:
        return self.budget.is_turn(name) and self.budget.admits(self.client, name, owed, need)

    def maintain(self, owed: int = 0, target: int = 0, after: float = 0.0) -> int:
        self.now += after
        return len(self.budget.maintain(self.client, owed, target))


def test_a_request_starts_when_there_are_slots_for_it_and_all_that_run() -> None:
    scene = Scene(10)
    assert scene.admits("a", need=4, owed=6)
    assert not scene.admits("a", need=5, owed=6)


def test_what_is_missing_is_asked_for_once() -> None:
    scene = Scene(10)
    assert not scene.admits("a", need=25, owed=5)
    scene.maintain(owed=5)
    scene.maintain(owed=5)
    assert [count for count, _ in scene.client.asked] == [20]
    scene.client.grant(20)
    scene.maintain(owed=5)
    assert scene.admits("a", need=25, owed=5)


def test_later_requests_do_not_overtake() -> None:
    scene = Scene(10)
    assert not scene.admits("a", need=25)
    assert not scene.admits("b", need=1)
    scene.budget.forget("a")
    assert scene.admits("b", need=1)


def test_too_few_slots_are_given_back_after_a_moment_and_asked_for_again() -> None:
    scene = Scene(0)
    assert not scene.admits("a", need=25, owed=2)
    scene.maintain(owed=2)
    scene.client.grant(20)
    assert scene.maintain(owed=2) == 0
    assert not scene.budget.gave_up
    assert scene.maintain(owed=2, after=0.2) == 18
    assert scene.budget.gave_up
    scene.maintain(owed=2, after=0.5)
    assert [count for count, _ in scene.client.asked] == [27, 25]
    assert not scene.budget.gave_up


def test_while_slots_are_scarce_requests_ask_one_at_a_time() -> None:
    scene = Scene(0)
    assert not scene.admits("a", need=25)
    scene.maintain()
    scene.client.grant(1)
    scene.maintain()
    scene.budget.forget("a")
    assert scene.budget.is_turn("b")
    assert not scene.budget.is_turn("c")


def test_a_store_that_does_not_answer_is_asked_again() -> None:
    scene = Scene(0)
    assert not scene.admits("a", need=25)
    scene.maintain()
    scene.client.asked[-1][1].set_exception(RuntimeError("gone"))
    scene.maintain()
    scene.maintain(after=1.0)
    scene.maintain(after=1.0)
    assert len(scene.client.asked) == 2


def test_slots_beyond_the_target_go_back() -> None:
    scene = Scene(300)
    assert scene.maintain(owed=10, target=300 - SLACK + 1) == 0
    assert scene.maintain(owed=10, target=100) == 200
    assert scene.maintain(owed=100, target=10) == 0


def test_growth_of_what_runs_is_asked_for_without_a_request_that_waits() -> None:
    scene = Scene(5)
    scene.maintain(owed=12)
    assert [count for count, _ in scene.client.asked] == [7]


@pytest.fixture
def host() -> Host:
    return Host(SimpleNamespace(request_id="a"), expected=10)  # type: ignore[arg-type]


def test_a_host_is_durable_up_to_the_first_gap(host: Host) -> None:
    for index in host.to_save(4):
        host.ordered(index)
    assert (host.known, host.owed, host.is_copying) == (4, 6, True)
    host.put(1, Place(1, 11))
    assert host.durable == 0
    host.put(0, Place(1, 10))
    assert host.durable == 2


def test_a_save_that_failed_is_ordered_again_first(host: Host) -> None:
    for index in host.to_save(3):
        host.ordered(index)
    host.missing.add(1)
    assert (host.owed, host.to_save(5)) == (8, [1, 3, 4])
    host.ordered(1)
    host.ordered(3)
    assert (host.known, host.missing, host.owed) == (4, set(), 6)


def test_a_lost_session_loses_only_what_was_under_way(host: Host) -> None:
    host.found([SlotRef(7, 1), SlotRef(8, 1)], epoch=1, lease_ids=(5,))
    for index in host.to_save(5):
        host.ordered(index)
    host.put(3, Place(1, 9))
    host.session_over()
    assert host.to_save(6) == [2, 4, 5]
    assert (host.durable, host.leases, host.epochs) == (2, [(1, 5)], {1})
