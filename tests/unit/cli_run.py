"""Runs the `kvsieve` command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvsieve_store.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """Exit code, and what was printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("status", "--format", "json") -> its Outcome."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["kvsieve", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run
