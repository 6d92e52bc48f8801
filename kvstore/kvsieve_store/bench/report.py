"""What a benchmark says: its numbers, the goals that they are held against, and where they were measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve_store import __version__


@dataclass(frozen=True)
class Goal:
    """A number to reach. at_least: False when `limit` is the most that `value` may be."""

    what: str
    value: float
    limit: float
    unit: str
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value < self.limit


@dataclass(frozen=True)
class Report:
    """One run of one benchmark.

    parameters: what it was run with. rows: one per case that was measured, numbers under names that end in
    their unit.
    """

    name: str
    parameters: dict[str, Any]
    rows: list[dict[str, Any]]
    goals: list[Goal] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As it goes to a JSON file, with the conditions of this machine."""
        goals = [{**vars(goal), "met": goal.met} for goal in self.goals]
        return {
            "name": self.name,
            "conditions": conditions(),
            "parameters": self.parameters,
            "rows": self.rows,
            "goals": goals,
        }


def conditions() -> dict[str, Any]:
    """Where a number comes from: processor, cores that this process may use, load (1 min), versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvsieve": __version__,
    }


def latencies_us(seconds: Sequence[float]) -> dict[str, float]:
    """Count and percentiles of latencies, microseconds."""
    values = np.asarray(seconds) * 1e6
    points = {f"p{p:g}_us": round(float(np.percentile(values, p)), 1) for p in (50, 90, 99)}
    return {"count": len(values), **points, "max_us": round(float(values.max()), 1)}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "unknown")
