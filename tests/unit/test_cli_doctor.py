"""`kvsieve doctor`: each check on hosts that are well and hosts that are not."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import socket
import tomllib
from pathlib import Path

import pytest

from kvsieve.v1.admin_pb2 import StatusResponse
from kvsieve_store.arena import capacity
from kvsieve_store.arena.directory import ArenaDirectory
from kvsieve_store.cli import checks
from kvsieve_store.cli.checks import Level
from kvsieve_store.errors import SettingsError
from kvsieve_store.settings import StoreSettings, load
from kvsieve_store.sizes import size
from tests.conftest import ROOT
from tests.protocol.client_stores import store_thread
from tests.unit.cli_run import Run, runner

LISTEN = {"listen": ["unix:///run/s.sock"]}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def settings(**values: object) -> StoreSettings:
    return load(LISTEN | values, None, {})


def installed(version: str) -> checks.Version:
    return lambda name: version


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.32.0", Level.OK),
        ("0.32.0+cpu", Level.OK),
        ("0.33.1rc2", Level.OK),
        ("0.33.0", Level.OK),
        ("0.31.2", Level.FAIL),
        ("0.34.0", Level.FAIL),
        ("1.0.0", Level.FAIL),
    ],
)
def test_vllm_versions(version: str, level: Level) -> None:
    assert checks.vllm(installed(version)).level is level


def test_no_vllm_is_no_failure() -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert checks.vllm(version).level is Level.WARN


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["vllm"]
    low, below = (".".join(map(str, v)) for v in (checks.VLLM_MIN, checks.VLLM_BELOW))
    assert requirement == f"vllm>={low},<{below}"


@pytest.mark.parametrize(
    ("allowed", "names", "level"),
    [
        (None, ["kvsieve"], Level.OK),
        ("other,kvsieve", ["kvsieve"], Level.OK),
        ("other", ["kvsieve"], Level.FAIL),
        ("", ["kvsieve"], Level.FAIL),
        (None, ["other"], Level.FAIL),
    ],
)
def test_plugin(allowed: str | None, names: list[str], level: Level) -> None:
    environ = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    assert checks.plugin(environ, names).level is level


@pytest.mark.parametrize(
    ("limit", "level"),
    [(resource.RLIM_INFINITY, Level.OK), (1 << 30, Level.OK), (8 << 20, Level.WARN), (0, Level.WARN)],
)
@pytest.mark.parametrize("device", ["nvidiactl", "infiniband"])
def test_memlock(tmp_path: Path, limit: int, level: Level, device: str) -> None:
    (tmp_path / device).touch()
    finding = checks.memlock(1 << 30, limit, tmp_path)
    assert finding.level is level
    if level is Level.WARN:
        assert f"{size(limit)}, less than the arena's 1 GiB" in finding.found
        assert all(part in finding.advice for part in ("--ulimit memlock=-1", "LimitMEMLOCK=infinity"))


def test_memlock_is_of_no_interest_without_a_device(tmp_path: Path) -> None:
    finding = checks.memlock(1 << 30, 8 << 20, tmp_path)
    assert (finding.level, finding.found, finding.advice) == (Level.OK, "8 MiB", "")


def test_arenas_of_dead_stores(tmp_path: Path) -> None:
    (tmp_path / "kvsieve-other").mkdir()
    dead, alive = (ArenaDirectory(tmp_path, f"unix:///{name}") for name in ("dead", "alive"))
    assert checks.arenas(tmp_path).level is Level.OK
    shutil.copytree(dead.path, copy := tmp_path / "kvsieve-0123456789ab-00000000")
    (copy / "seg-000").write_bytes(bytes(3 << 20))
    finding = checks.arenas(tmp_path)
    assert (finding.level, "3 MiB" in finding.found) == (Level.WARN, True)
    assert str(copy) in finding.advice
    assert str(alive.path) not in finding.advice
    assert copy.exists()
    for directory in (dead, alive):
        directory.close()


def test_an_arena_on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "not_in_memory", lambda path: "arena on ext4: slow; use a tmpfs")
    finding = checks.memory(settings(shm_dir=str(tmp_path), pool_size="64MiB"))
    assert (finding.level, finding.found) == (Level.WARN, "arena on ext4: slow")


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_no_default_socket(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def none(environ: object = None) -> Path:
        raise SettingsError("listen: no default socket; give --listen")

    monkeypatch.delenv("KVSIEVE_ENDPOINT", raising=False)
    monkeypatch.setattr("kvsieve_store.cli.endpoint.default_socket", none)
    monkeypatch.setattr("kvsieve_store.settings.default_socket", none)
    outcome = run(command)
    assert "--endpoint" in outcome.out + outcome.err
    assert "--listen unix" not in outcome.out + outcome.err
    if command == "doctor":
        findings = {f["check"]: f["level"] for f in run("doctor", "--format", "json").json}
        assert findings["store"] == "fail"
        assert {"memory", "vllm", "hashes"} < set(findings)


def test_memory_that_does_not_fit_is_a_failure_with_advice() -> None:
    finding = checks.memory(settings(pool_size="900TiB"))
    assert finding.level is Level.FAIL
    assert "--pool-size" in finding.advice


def test_memory_of_a_running_store_is_taken_already(tmp_path: Path) -> None:
    """What the settings say does not matter then, but whether an engine could map the arena from here."""
    arena = StatusResponse(arena_bytes=5 << 30, arena_dir=str(tmp_path))
    finding = checks.memory(settings(pool_size="900TiB"), arena)
    assert (finding.level, finding.found) == (Level.OK, f"the store has its 5 GiB in {tmp_path}")


def test_an_arena_that_this_container_does_not_see(tmp_path: Path) -> None:
    arena = StatusResponse(arena_bytes=5 << 30, arena_dir=str(tmp_path / "kvsieve-1"))
    finding = checks.memory(settings(pool_size="64MiB"), arena)
    assert (finding.level, finding.found) == (
        Level.FAIL,
        f"the store's arena of 5 GiB, {tmp_path}/kvsieve-1, is not to be seen from here",
    )
    assert all(part in finding.advice for part in ("--ipc", "medium: Memory", str(tmp_path)))


def test_an_arena_without_the_right_to_map_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    finding = checks.memory(settings(), StatusResponse(arena_bytes=1 << 30, arena_dir=str(tmp_path)))
    assert finding.level is Level.FAIL
    assert "no right to use" in finding.found
    assert f"ls -l {tmp_path.parent}" in finding.advice


def test_shm_of_a_container_is_smaller_than_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stat:
        f_bavail, f_frsize = (64 << 20) // 4096, 4096

    monkeypatch.setattr(capacity.os, "statvfs", lambda path: Stat)
    finding = checks.memory(settings(shm_dir=str(tmp_path), pool_size="8GiB"))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        f"pool_size: 8 GiB needed, 64 MiB free on {tmp_path}",
    )
    assert "--shm-size" in finding.advice


def test_memory_on_a_mount_that_is_not_there(tmp_path: Path) -> None:
    finding = checks.memory(settings(shm_dir=str(tmp_path / "nowhere")))
    assert finding.level is Level.FAIL
    assert "nowhere" in finding.found


def test_hugepages(tmp_path: Path) -> None:
    assert checks.hugepages(None, tmp_path).level is Level.OK
    assert checks.hugepages(Path("/mnt/huge"), tmp_path).level is Level.FAIL
    folder = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    (folder / "nr_hugepages").write_text("512\n")
    (folder / "free_hugepages").write_text("500\n")
    finding = checks.hugepages(Path("/mnt/huge"), tmp_path)
    assert (finding.level, finding.found) == (Level.OK, "512 of 2048kB, 500 free")


@pytest.mark.parametrize(
    ("nodes", "node", "level"),
    [(1, None, Level.OK), (2, None, Level.WARN), (2, 1, Level.OK), (2, 2, Level.FAIL), (0, None, Level.OK)],
)
def test_numa(tmp_path: Path, nodes: int, node: int | None, level: Level) -> None:
    for n in range(nodes):
        (tmp_path / f"devices/system/node/node{n}").mkdir(parents=True)
    assert checks.numa(node, tmp_path).level is level


@pytest.mark.parametrize(("seed", "level"), [(None, Level.OK), ("0", Level.OK), ("random", Level.WARN)])
def test_hash_seed(seed: str | None, level: Level) -> None:
    assert checks.hashes({} if seed is None else {"PYTHONHASHSEED": seed}).level is level


def test_store_answers() -> None:
    with store_thread() as endpoint:
        finding, status = checks.store(endpoint)
        assert finding.level is Level.OK
        assert status is not None
        assert status.arena_bytes == 32 << 20
        assert checks.memory(settings(), status).level is Level.OK


def test_the_arena_that_counts_is_the_running_store_s(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    memlock = checks.memlock
    monkeypatch.setattr(checks, "memlock", lambda needed: asked.append(needed) or memlock(needed))
    with store_thread() as endpoint:
        run("doctor", "--endpoint", endpoint, "--pool-size", "900TiB")
    run("doctor", "--endpoint", endpoint, "--pool-size", "1GiB")
    assert asked == [32 << 20, 1 << 30]


def test_no_store_yet_is_no_failure(tmp_path: Path) -> None:
    finding, status = checks.store(f"unix://{tmp_path}/s.sock")
    assert status is None
    assert finding.level is Level.WARN
    assert "kvsieve serve" in finding.advice


def test_a_socket_that_nobody_serves(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s.sock"))
    assert checks.store(f"unix://{tmp_path}/s.sock")[0].level is Level.FAIL


def test_a_file_in_the_socket_s_place(tmp_path: Path) -> None:
    """It may be one that somebody needs: doctor does not say to remove it."""
    (tmp_path / "s.sock").touch()
    finding = checks.store(f"unix://{tmp_path}/s.sock")[0]
    assert "not a socket" in finding.found
    assert "remove" not in finding.advice


def test_an_address_that_makes_no_sense() -> None:
    assert checks.store("ftp://x")[0].level is Level.FAIL


@pytest.mark.parametrize("endpoint", ["nonsense", "unix://", "unix://s.sock", "localhost:x", "0.0.0.0:1"])
def test_whatever_the_address_all_else_is_checked(run: Run, endpoint: str) -> None:
    outcome = run("doctor", "--endpoint", endpoint, "--pool-size", "64MiB", "--format", "json")
    assert outcome.code == 1
    found = {finding["check"]: finding for finding in outcome.json}
    assert found["store"]["level"] == "fail"
    assert found["memory"]["level"] == "ok"


def test_report(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSIEVE_ENDPOINT", f"unix://{tmp_path}/s.sock")
    flags = ["doctor", "--pool-size", "64MiB"]
    outcome = run(*flags)
    assert outcome.code == 0
    assert "no store runs there" in outcome.out
    monkeypatch.setenv("VLLM_PLUGINS", "")
    outcome = run(*flags, "--format", "json")
    assert outcome.code == 1
    assert {f["check"]: f["level"] for f in outcome.json}["plugin"] == "fail"


@pytest.mark.parametrize(
    ("packages", "environ", "found"),
    [
        ({}, {}, "not looked at"),
        ({"vllm": "0.32.0+cpu"}, {}, "vllm>=0.33 with CUDA, CuPy"),
        ({"vllm": "0.33.0", "cupy-cuda12x": "14.0"}, {}, "vLLM and CuPy are there"),
        (
            {"vllm": "0.33.0", "cupy": "14.0"},
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "VLLM_USE_V2_MODEL_RUNNER unset instead of 0",
        ),
    ],
)
def test_what_sparse_mode_lacks_is_said_and_is_no_failure(
    packages: dict[str, str], environ: dict[str, str], found: str
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    finding = checks.sparse(environ, version)
    assert finding.level is Level.OK
    assert found in finding.found
