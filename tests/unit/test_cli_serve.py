"""`kvsieve serve`: flags, banner, start and end. And commands of other packages."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from kvsieve_store import __version__
from kvsieve_store.arena.capacity import not_in_memory
from kvsieve_store.cli.terminal import logs_above, transfer_config
from kvsieve_store.settings import StoreSettings
from tests.conftest import StoreProcess
from tests.unit.cli_run import Run, runner

Start = Callable[..., StoreProcess]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "150")
    return runner(monkeypatch, capsys)


def test_every_setting_has_a_flag(run: Run) -> None:
    shown = run("serve", "--help").out
    for name in StoreSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown, name


def test_help_is_readable_on_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("serve", "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    for name, field in StoreSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown.replace("/", " "), name
        assert str(field.description)[:30] in re.sub(r"\s+", " ", shown), name


def test_flags_become_settings(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stops short of a store: what it would be started with."""
    started: list[StoreSettings] = []

    def start(settings: StoreSettings, companion: object) -> int:
        started.append(settings)
        return 0

    monkeypatch.setattr("kvsieve_store.server.process.run", start)
    monkeypatch.setenv("KVSIEVE_FREE_HIGH", "0.5")
    file = tmp_path / "store.yaml"
    file.write_text("session_timeout: 7\nmax_sessions: 3\n")
    listen = [f"unix://{tmp_path}/s.sock", "127.0.0.1:4000"]
    flags = ["--config", str(file), "--pool-size", "3GiB", "--no-prefault", "--max-sessions", "4"]
    flags += ["--listen", listen[0], "--listen", listen[1], "--quotas", "a=1GiB", "--quotas", "b=2GiB"]
    assert run("serve", *flags, "--http", "").code == 0
    (settings,) = started
    assert settings.pool_size == 3 << 30
    assert settings.prefault is False
    assert settings.listen == tuple(listen)
    assert settings.quotas == {"a": 1 << 30, "b": 2 << 30}
    assert settings.http == ""
    assert (settings.session_timeout, settings.max_sessions, settings.free_high) == (7, 4, 0.5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pool-size", "many"], "--pool-size"),
        (["--free-low", "2"], "--free-low"),
        (["--listen", "0.0.0.0:1"], "--listen"),
        (["--log-level", "loud"], "--log-level"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml"),
        (["--poolsize", "1GiB"], "--poolsize"),
    ],
)
def test_a_bad_setting_is_wrong_usage_and_named(run: Run, flags: list[str], named: str) -> None:
    outcome = run("serve", *flags)
    assert outcome.code == 2
    assert named in outcome.err


def test_a_store_starts_and_says_how_engines_reach_it(start_store: Start) -> None:
    store = start_store("--pool-size", "64MiB")
    log = store.log.read_text()
    assert f"kvsieve {__version__}" in log
    assert "64 MiB" in log
    assert f"http://{store.http}" in log
    (config,) = re.findall(r"--kv-transfer-config '(.*)'", log)
    assert json.loads(config)["kv_connector_extra_config"] == {"kvsieve.endpoint": store.endpoint}
    assert store.terminate() == 0
    assert not store.socket.exists()


def test_json_logs_are_json_only(start_store: Start) -> None:
    store = start_store("--pool-size", "64MiB", "--log-format", "json")
    lines = store.log.read_text().splitlines()
    assert all("message" in json.loads(line) for line in lines)
    assert lines


def test_log_lines_stay_off_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    console = Console(stderr=True, force_terminal=True, soft_wrap=True, width=80)
    with logs_above(Progress(console=console, transient=True)) as progress:
        progress.add_task("bar", total=1.0)
        progress.refresh()
        logging.getLogger("kvsieve_store").warning("ready")
    assert re.search(r"(\x1b\[2K|\n)ready\n", screen.getvalue())
    assert handler.stream is screen


def test_an_arena_on_a_disk_is_warned_of(start_store: Start, tmp_path: Path) -> None:
    complaint = not_in_memory(tmp_path)
    if not complaint:
        pytest.skip("the temporary folder is in memory")
    store = start_store("--pool-size", "64MiB", "--shm-dir", str(tmp_path))
    assert complaint in store.log.read_text()


def test_the_transfer_config_names_the_connector() -> None:
    config = json.loads(transfer_config("unix:///s"))
    assert config["kv_connector"] == "KVSieveConnector"
    assert config["kv_connector_module_path"] == "kvsieve_connector.connector"
    assert config["kv_role"] == "kv_both"


def test_a_second_store_on_the_socket_fails(start_store: Start, run: Run) -> None:
    store = start_store("--pool-size", "64MiB")
    second = StoreProcess("--pool-size", "64MiB", "--listen", store.endpoint)
    try:
        with pytest.raises(RuntimeError, match=str(store.pid)):
            second.start()
    finally:
        second.close()
    assert run("status", "--endpoint", store.endpoint).code == 0


def test_an_http_port_that_is_taken(start_store: Start) -> None:
    store = start_store("--pool-size", "64MiB")
    second = StoreProcess("--pool-size", "64MiB", "--http", store.http)
    try:
        with pytest.raises(
            RuntimeError, match=r"can't listen on .*in use; give another --http, or --http ''"
        ):
            second.start()
    finally:
        second.close()


def test_version(run: Run) -> None:
    assert run("version").out == f"{__version__}\n"
    assert run("--version").out == f"{__version__}\n"


def test_a_command_that_cannot_be_loaded_takes_no_other_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = importlib.metadata.EntryPoint("broken", "no_such_module:run", "kvsieve.commands")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [entry])
    assert run("version").code == 0
    outcome = run("broken")
    assert outcome.code == 1
    assert "no_such_module" in outcome.err
    assert outcome.err.count("\n") == 1
