"""`kvsieve demo` as a user runs it: two real engines, one after the other, on one store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsieve_connector.demo.model import FOLDER

DEMO = [sys.executable, "-m", "kvsieve_store.cli.main", "demo"]

pytestmark = pytest.mark.timeout(900)


def demo(*flags: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # The engines here are `vllm serve`, which this suite's setting for engines in one process does not fit.
    environ = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environ["XDG_CACHE_HOME"] = str(cache)
    return subprocess.run([*DEMO, *flags], capture_output=True, text=True, env=environ, timeout=880)


def test_the_second_engine_answers_from_the_store(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "kvsieve").mkdir()
    (tmp_path / "kvsieve" / FOLDER).symlink_to(smollm2)
    done = demo("--tokens", "600", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "48217" in done.stdout
    assert "same answer: yes" in done.stdout
    assert "used the store: yes" in done.stdout


def test_an_engine_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = demo("--model", str(tmp_path / "empty"), cache=tmp_path)
    assert done.returncode == 1
    assert "end of engine-first.log" in done.stderr
    assert "the engine ended with status" in done.stderr
