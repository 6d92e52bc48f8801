"""Slots before requests: who may start, what the store is asked for, and what is given back."""

from __future__ import annotations

import logging
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsieve_connector.sparse.budget import PATIENCE_SECONDS, ROUND_SECONDS, SLACK, SlotBudget
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
    """An engine's requests before a store."""

    def __init__(self, credits: int) -> None:
        self.now = 0.0
        self.free = 0
        """Slots that the store can grant."""
        self.owed: dict[str, int] = {}
        self.client: Any = Client(credits)
        self.budget = SlotBudget(lambda: self.now, random.Random(1))

    def admits(self, name: str, need: int, owed: int = 0) -> bool:
        return self.budget.is_turn(name) and self.budget.admits(self.client, name, owed, need)

    def ask(self, answers: bool = True, /, **needs: int) -> list[str]:
        """A step: each request in turn, then what the store says. Returns those that started; they owe what
        they needed until they end()."""
        started = []
        for name, need in needs.items():
            if self.admits(name, need, sum(self.owed.values())):
                self.budget.forget(name)
                self.owed[name] = need
                started.append(name)
        self.free += self.maintain(sum(self.owed.values()))
        for count, future in self.client.asked if answers else ():
            if not future.done():
                granted = min(count, self.free)
                self.free -= granted
                self.client.credits += granted
                future.set_result(granted)
        return started

    def run(self, seconds: float, /, **needs: int) -> list[str]:
        """Steps of 50 ms. Returns those that started."""
        started: list[str] = []
        until = self.now + seconds
        while self.now < until:
            started += self.ask(**{name: need for name, need in needs.items() if name not in started})
            self.now += 0.05
        return started

    def end(self, name: str) -> None:
        """Its slots are free again."""
        count = self.owed.pop(name, 0)
        self.client.credits -= count
        self.free += count

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


# A request that can't start


@pytest.fixture
def stuck() -> Scene:
    """ "big" waits for slots that never come free; 8 are."""
    scene = Scene(0)
    scene.free = 8
    for _ in range(4):
        scene.ask(big=25)
    return scene


def test_a_request_that_can_not_start_lets_others_pass_after_a_while(stuck: Scene) -> None:
    assert stuck.run(PATIENCE_SECONDS - 1, big=25, small=4) == []
    assert stuck.run(3, big=25, small=4) == ["small"]


def test_of_those_behind_it_only_those_that_fit_start(stuck: Scene) -> None:
    assert stuck.run(PATIENCE_SECONDS + 4, big=25, wide=9, small=4) == ["small"]


def test_it_has_its_turn_again_and_starts_before_those_that_came_later(stuck: Scene) -> None:
    assert stuck.run(PATIENCE_SECONDS + 4, big=25, small=4) == ["small"]
    assert stuck.run(5, big=25, late=4) == []
    stuck.free += 30
    assert stuck.run(3, big=25, late=4) == ["big", "late"]


def test_while_others_keep_coming_it_has_its_turn_all_the_same(stuck: Scene) -> None:
    """Each that starts ends at once: without a turn of its own, the big one would never see 25 free slots."""
    started, turns = [], 0
    for _ in range(3000):
        started += stuck.ask(**{"big": 25, f"small{len(started)}": 4})
        stuck.end(f"small{len(started) - 1}")
        turns += stuck.budget.waiting == "big"
        stuck.now += 0.02
    assert len(started) > 20
    assert turns * 0.02 > 15


def test_it_keeps_its_turn_while_more_slots_come_within_reach(stuck: Scene) -> None:
    for _ in range(8):
        assert stuck.run(PATIENCE_SECONDS / 2, big=25, small=4) == []
        stuck.free += 1


def test_the_log_says_once_that_it_can_not_start(
    stuck: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    stuck.run(5 * PATIENCE_SECONDS, big=25)
    said = {id(record): record for record in caplog.records}  # pytest may hear of one by two loggers
    assert [record.getMessage().split(",")[0] for record in said.values()] == [
        "kvsieve: a request waits for 25 free slots of the store's arena"
    ]


class Turns(RuleBasedStateMachine):
    """Requests of one engine; others hold and free slots as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(0)
        self.scene.free = 40
        self.wants: dict[str, int] = {}
        self.count = 0

    @rule(need=st.integers(0, 50))
    def submit(self, need: int) -> None:
        self.count += 1
        self.wants[f"r{self.count}"] = need

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.scene.owed:
            self.scene.end(data.draw(st.sampled_from(sorted(self.scene.owed))))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.wants:
            name = data.draw(st.sampled_from(sorted(self.wants)))
            del self.wants[name]
            self.scene.budget.forget(name)

    @rule(count=st.integers(-40, 40))
    def others(self, count: int) -> None:
        """Others free or take slots."""
        self.scene.free = max(self.scene.free + count, 0)

    @rule()
    def lose_the_session(self) -> None:
        """The requests' blocks stay where they are."""
        self.scene.budget.session_over()
        self.scene.client.asked.clear()

    @rule(seconds=st.floats(0, 15), answers=st.booleans())
    def steps(self, seconds: float, answers: bool) -> None:
        self._run(seconds, answers)

    @rule()
    def quiet(self) -> None:
        """When nothing else happens, whatever fits starts, however much the others want."""
        self._run(PATIENCE_SECONDS + ROUND_SECONDS + 5)
        left = self.scene.free + self.scene.client.credits - sum(self.scene.owed.values())
        assert all(need > left for need in self.wants.values()), (self.wants, left)

    @invariant()
    def none_can_run_out_of_slots(self) -> None:
        assert self.scene.client.credits >= sum(self.scene.owed.values())

    def _run(self, seconds: float, answers: bool = True) -> None:
        until = self.scene.now + seconds
        while self.scene.now < until:
            for name in self.scene.ask(answers, **self.wants):
                del self.wants[name]
            self.scene.now += 0.05


TestTurns = Turns.TestCase
TestTurns.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)


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
