"""PullPlan against a list of what happened."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsieve_store.peers.plan import PullPlan

ATTEMPTS = 3
BATCH = 4


class Pulling(RuleBasedStateMachine):
    """here: blocks of this store, in order, "found" or "pulled". readable: so many more are offered.
    coming: behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 12
        self.plan = PullPlan(self.total, batch=BATCH, attempts=ATTEMPTS)
        self.here: list[str] = []
        self.readable = self.coming = 0
        self.failures = 0
        self.bad = 0
        self.over = False
        self.last_bad = -1

    @precondition(lambda self: self.plan.step == "offer")
    @rule(data=st.data())
    def found(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.total - len(self.here)))
        self.plan.found(count)
        self.here += ["found"] * count

    @precondition(lambda self: self.plan.step == "offer")
    @rule(share=st.floats(0, 1), coming=st.floats(0, 1), more_may_come=st.booleans())
    def offered(self, share: float, coming: float, more_may_come: bool) -> None:
        self.readable = round(share * (self.total - len(self.here)))
        self.coming = round(coming * (self.total - len(self.here) - self.readable))
        self.plan.offered(self.readable, self.coming, more_may_come=more_may_come)
        self.over = self.over or not (self.readable or self.coming or more_may_come)

    @precondition(lambda self: self.plan.step == "follow")
    @rule(data=st.data())
    def arrived(self, data: st.DataObject) -> None:
        """Blocks that were being written are sealed, and here."""
        asked = data.draw(st.integers(1, self.coming))
        good = data.draw(st.integers(0, asked))
        self.coming = self.coming - asked if good == asked else 0
        self.plan.landed(asked, good)
        self._count(asked, good)

    @precondition(lambda self: self.plan.step == "follow")
    @rule()
    def came_no_more(self) -> None:
        self.plan.came_no_more()
        self.coming = 0

    @precondition(lambda self: self.plan.step == "read")
    @rule(data=st.data())
    def landed(self, data: st.DataObject) -> None:
        most = self.plan.next_batch()
        assert 1 <= most <= min(BATCH, self.readable)
        asked = data.draw(st.integers(1, most))
        good = data.draw(st.integers(0, asked))
        self.plan.landed(asked, good)
        self.readable -= good
        self._count(asked, good)

    def _count(self, asked: int, good: int) -> None:
        self.here += ["pulled"] * good
        if good:
            self.failures = 0
        if good < asked:
            self.bad += 1
            self.over = self.over or self.last_bad == len(self.here)
            self.last_bad = len(self.here)

    @precondition(lambda self: self.plan.step != "done")
    @rule()
    def broke(self) -> None:
        self.plan.broke("it broke")
        self.readable = self.coming = 0
        self.failures += 1
        self.over = self.over or self.failures == ATTEMPTS

    @precondition(lambda self: self.plan.step != "done")
    @rule()
    def stop(self) -> None:
        self.plan.stop("stopped")
        self.over = True

    @precondition(lambda self: self.plan.step == "done")
    @rule()
    def over_is_over(self) -> None:
        reason = self.plan.reason
        if reason:
            self.plan.stop("later")
        assert self.plan.reason == reason

    @invariant()
    def it_agrees(self) -> None:
        plan = self.plan
        assert plan.present == len(self.here) <= self.total
        assert plan.pulled == self.here.count("pulled")
        assert plan.damaged == self.bad
        done = self.over or len(self.here) == self.total
        assert (plan.step == "done") == done
        assert bool(plan.reason) == self.over
        if not done:
            assert plan.step == ("read" if self.readable else "follow" if self.coming else "offer")


Pulling.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPulling = Pulling.TestCase
