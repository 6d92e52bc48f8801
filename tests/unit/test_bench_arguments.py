"""Every benchmark says how it is used when it is asked, or called wrongly, and then runs nothing."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import runpy
import sys
from pathlib import Path

import pytest

import bench
import bench.__main__ as all_of_them
import bench.gpu.__main__ as gpu


def _has_main(module: pkgutil.ModuleInfo) -> bool:
    spec = importlib.util.find_spec(module.name)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    return module.name.endswith("__main__") or any(getattr(node, "name", "") == "main" for node in tree.body)


MODULES = [each.name for each in pkgutil.walk_packages(bench.__path__, "bench.") if _has_main(each)]
COMMANDS = [[name.removesuffix(".__main__")] for name in MODULES]
COMMANDS += [["bench.gpu", name] for name in gpu.NAMES]


def ran(command: list[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The status that it exits with."""
    module, *rest = command
    if module.startswith("bench.gpu") and command != ["bench.gpu"]:
        pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", ["-m", *rest, *arguments])
    for name in (module, f"{module}.__main__"):  # it is to run, not to be found
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as exited:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return exited.value.code


def test_there_are_all_of_them() -> None:
    assert {f"bench.{name}" for name in all_of_them._ALL} - {"bench.traces"} <= set(MODULES)
    assert {f"bench.{name}__main__" for name in ("", "traces.", "quality.", "gpu.")} <= set(MODULES)
    assert {f"bench.gpu.{name}" for name in gpu.NAMES} <= set(MODULES)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(command, monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m bench")
    assert len(out.splitlines()) > 2


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("argument", ["--nonsense", "nonsense"])
def test_wrong_arguments(
    command: list[str], argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(command, monkeypatch, argument) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: python -m bench")
    assert "nonsense" in captured.err


def test_a_name_that_is_wrong_runs_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(["bench"], monkeypatch, "copy", "nonsense") == 2
    assert "there are copy, match" in capsys.readouterr().err
    assert ran(["bench.gpu"], monkeypatch) == 2
    assert ran(["bench.gpu", "all"], monkeypatch, "--help") == 2
