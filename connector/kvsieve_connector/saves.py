"""Blocks on their way to the store: ordered, written by the ranks, sealed."""

from __future__ import annotations

from collections import Counter

from kvsieve_connector.metadata import WorkerReport
from kvsieve_connector.requests import SaveJob, Sealing


class Saves:
    """The scheduler half's. Its length is the number of blocks that are ordered, or whose seal is due;
    it contains their keys."""

    def __init__(self, ranks: int) -> None:
        """ranks: that write a block together."""
        self._ranks = ranks
        self._jobs: dict[int, SaveJob] = {}
        self._next = 1
        self._keys: Counter[bytes] = Counter()
        self._sealing: list[Sealing] = []

    def __len__(self) -> int:
        return len(self._jobs) + sum(len(sealing.jobs) for sealing in self._sealing)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, number: int) -> SaveJob:
        """One that the ranks are not done with."""
        return self._jobs[number]

    def begin(self, job: SaveJob) -> int:
        """The job's number, by which the ranks report it."""
        number, self._next = self._next, self._next + 1
        self._jobs[number] = job
        self._keys[job.key] += 1
        return number

    def reported(self, report: WorkerReport) -> tuple[list[SaveJob], list[SaveJob]]:
        """Jobs that all ranks are done with since: those that all have written, and those that failed."""
        ready: list[SaveJob] = []
        failed: list[SaveJob] = []
        for number in report.saved.keys() | report.failed.keys():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.written += report.saved.get(number, 0)
            job.failed += report.failed.get(number, 0)
            # A rank that is not done may still write to the slot.
            if job.written + job.failed >= self._ranks:
                del self._jobs[number]
                (failed if job.failed else ready).append(job)
        return ready, failed

    def sent(self, sealing: Sealing) -> None:
        """The seal of these blocks is on its way."""
        self._sealing.append(sealing)

    def answered(self) -> list[Sealing]:
        """Seals that have been answered since the last call."""
        done = [sealing for sealing in self._sealing if sealing.future.done()]
        if done:
            self._sealing = [sealing for sealing in self._sealing if sealing not in done]
        return done

    def landed(self, job: SaveJob) -> None:
        """Nothing more happens to the block."""
        self._keys[job.key] -= 1
        if self._keys[job.key] <= 0:
            del self._keys[job.key]

    def forget(self) -> None:
        """The session is over: its jobs and keys mean nothing any more. Seals that were sent are still
        answered."""
        self._jobs.clear()
        self._keys.clear()
