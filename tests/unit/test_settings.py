"""StoreSettings: where values come from, which one wins, and what a bad one is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvsieve_store.addresses import TcpAddress, UnixAddress, default_socket, parse_address
from kvsieve_store.errors import SettingsError
from kvsieve_store.settings import StoreSettings, load


def from_env(**environ: str) -> StoreSettings:
    return load({}, None, {f"KVSIEVE_{name}": value for name, value in environ.items()})


def refusal(flags: Mapping[str, Any] = {}, environ: Mapping[str, str] = {}, file: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(flags, file, environ)
    return str(caught.value)


def test_defaults() -> None:
    settings = load({}, None, {"XDG_RUNTIME_DIR": "/run/user/1"})
    assert settings.pool_size == 8 << 30
    assert settings.extents == 128
    assert settings.listen == (f"unix://{default_socket({'XDG_RUNTIME_DIR': '/run/user/1'})}",)
    assert settings.http_address == TcpAddress("127.0.0.1", 9317)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("30gb", 30_000_000_000),
        ("10Gi", 10 << 30),
        ("8G", 8 * 10**9),
        ("1073741824", 1 << 30),
    ],
)
def test_sizes_have_suffixes(text: str, size: int) -> None:
    assert from_env(POOL_SIZE=text).pool_size == size


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("free_low: 0.01\nfree_high: 0.3\npool_size: 1GiB\nsession_timeout: 7\n")
    settings = load(
        {"pool-size": "3GiB", "free_high": None},
        file,
        {"KVSIEVE_POOL_SIZE": "2GiB", "KVSIEVE_FREE_HIGH": "0.2"},
    )
    assert (settings.pool_size, settings.free_high, settings.free_low) == (3 << 30, 0.2, 0.01)
    assert settings.session_timeout == 7
    assert settings.log_level == "info"


def test_lists_and_maps_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("listen: ['unix:///tmp/a.sock', '127.0.0.1:7000']\nquotas: {a: 1GiB, b: 2GiB}\n")
    quotas = {"a": 1 << 30, "b": 2 << 30}
    assert load({}, file, {}).addresses == (UnixAddress(Path("/tmp/a.sock")), TcpAddress("127.0.0.1", 7000))
    assert load({}, file, {}).quotas == quotas
    assert from_env(LISTEN="unix:///tmp/a.sock, localhost:7000").listen == (
        "unix:///tmp/a.sock",
        "localhost:7000",
    )
    assert from_env(QUOTAS="a=1GiB,b=2GiB").quotas == quotas
    assert from_env(QUOTAS='{"a": "1GiB", "b": "2GiB"}').quotas == quotas
    assert load({"quotas": ["a=1GiB", "b=2GiB"]}, None, {}).quotas == quotas


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("poolsize: 1GiB\n")
    assert refusal(file=file) == f"poolsize in {file}: no such setting; the nearest is pool_size"
    assert refusal(environ={"KVSIEVE_POOLSIZE": "1"}).endswith("the nearest is KVSIEVE_POOL_SIZE")
    assert (
        refusal({"sesion-timeout": 1})
        == "--sesion-timeout: no such setting; the nearest is --session-timeout"
    )


def test_variables_that_are_not_settings_of_the_store_are_left_alone() -> None:
    """Those of the CLI, and those that Kubernetes makes from a Service that is called kvsieve."""
    from_env(
        CONFIG="store.yaml",
        ENDPOINT="unix:///x",
        SERVICE_HOST="10.0.0.1",
        SERVICE_PORT="9317",
        SERVICE_PORT_HTTP="9317",
        PORT="tcp://10.0.0.1:9317",
        PORT_9317_TCP="tcp://10.0.0.1:9317",
        METRICS_PORT_9317_TCP_ADDR="10.0.0.1",
    )


def test_every_bad_value_is_named_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("free_low: 7\nlog_level: loud\n")
    lines = refusal({"pool_size": "much"}, {"KVSIEVE_NUMA_NODE": "left"}, file).splitlines()
    assert len(lines) == 4
    for label in (
        "--pool-size: 'much'",
        "KVSIEVE_NUMA_NODE: 'left'",
        "free_low in .*: 7",
        "log_level in .*: 'loud'",
    ):
        assert any(re.match(label + " given: ", line) for line in lines), lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"segment_size": "1MiB"}, "--segment-size: 1 MiB given, a multiple of extent_size (64 MiB)"),
        ({"extent_size": "5000"}, "--extent-size: 4.9 KiB (5000 bytes) given, a multiple of 4 KiB"),
        ({"extent_size": "0"}, "--extent-size: 0 B given"),
        ({"pool_size": "1MiB"}, "--pool-size: 1 MiB given, at least one extent (64 MiB)"),
        ({"pool_quota": "1MiB"}, "--pool-quota: 1 MiB given, at least one extent"),
        ({"quotas": ["a=1MiB"]}, "quotas[a]: 1 MiB given, at least one extent"),
        ({"quotas": ["a"]}, "--quotas: 'a' given: NAME=SIZE is expected"),
        ({"free_low": 0.5}, "--free-low: 0.5 given, at most free_high (0.05)"),
        ({"listen": ["0.0.0.0:7000"]}, "--listen: tcp://0.0.0.0:7000 is not a loopback address"),
        ({"listen": ["unix:relative"]}, "--listen: 'unix:relative': a unix socket needs an absolute path"),
        ({"listen": [f"unix:///{'x' * 108}"]}, "--listen: "),
        ({"listen": []}, "--listen: [] given"),
        ({"http": "nowhere"}, "--http: 'nowhere': expected"),
        ({"http": "unix:///tmp/x"}, "--http: 'unix:///tmp/x' given, host:port required"),
        ({"session_timeout": 0}, "--session-timeout: 0 given"),
        ({"session_timeout": 31}, "--session-timeout: 31 given"),
    ],
)
def test_what_does_not_fit_together_is_refused(flags: dict[str, Any], message: str) -> None:
    assert refusal(flags).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pool_size": "banana"}, "--pool-size: 'banana' given: a size is expected, like 8GiB or 512MiB"),
        ({"pool_size": "8 apples"}, "--pool-size: '8 apples' given: a size is expected, like 8GiB or 512MiB"),
        ({"quotas": ["a=x"]}, "--quotas[a]: 'x' given: a size is expected, like 8GiB or 512MiB"),
        ({"quotas": "{a"}, "--quotas: '{a' given: NAME=SIZE is expected, like Qwen3-0.6B=8GiB"),
        ({"quotas": 5}, "--quotas: 5 given: NAME=SIZE is expected, like Qwen3-0.6B=8GiB"),
        ({"numa_node": "y"}, "--numa-node: 'y' given: a whole number is expected"),
        ({"numa_node": "-1"}, "--numa-node: '-1' given: at least 0 required"),
        ({"free_low": "x"}, "--free-low: 'x' given: a number is expected"),
        ({"max_sessions": "5000"}, "--max-sessions: '5000' given: at most 1024 allowed"),
        ({"prefault": "maybe"}, "--prefault: 'maybe' given: yes or no is expected"),
        ({"log_level": "x"}, "--log-level: 'x' given: 'debug', 'info', 'warning' or 'error' expected"),
        ({"listen": []}, "--listen: [] given: at least one is required"),
        ({"listen": 7}, "--listen: 7 given: a list is expected"),
        ({"shm_dir": [1]}, "--shm-dir: [1] given: a path is expected"),
    ],
)
def test_bad_values_are_told_in_plain_words(flags: dict[str, Any], message: str) -> None:
    assert refusal(flags) == message


def test_the_way_out_of_loopback_is_named() -> None:
    assert "--allow-insecure-tcp" in refusal({"listen": ["0.0.0.0:7000"]})


def test_tcp_beyond_loopback_must_be_asked_for() -> None:
    flags = {"listen": ["0.0.0.0:7000"], "allow_insecure_tcp": True}
    assert load(flags, None, {}).addresses == (TcpAddress("0.0.0.0", 7000),)


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "store.yaml"
    file.write_text(content)
    assert refusal(file=file).startswith(f"{file}: ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: No such file or directory"


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("")
    assert load({}, file, {}) == load({}, None, {})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("unix:/run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("tcp://localhost:80", TcpAddress("localhost", 80)),
        ("[::1]:80", TcpAddress("::1", 80)),
    ],
)
def test_addresses(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix:///", "unix://run", "host", "host:", "host:66000", ":80", "a b:80", "::1:80"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_address(text)


def test_peers_are_served_beyond_loopback_only_where_it_is_allowed() -> None:
    given = {"listen": "unix:///s", "peer_listen": "10.1.2.3:9400"}
    with pytest.raises(SettingsError, match=r"peer-listen: 10.1.2.3:9400 is not a loopback address"):
        load(given, None, {})
    allowed = load({**given, "allow_insecure_tcp": True}, None, {})
    assert allowed.peer_address is not None
    assert (allowed.peer_address.host, allowed.transports) == ("10.1.2.3", ("shm", "ucx", "tcp"))
    assert load({"listen": "unix:///s"}, None, {}).peer_address is None


def test_stores_that_may_be_pulled_from_come_from_every_source(tmp_path: Path) -> None:
    file, one, both = tmp_path / "store.yaml", ("10.0.0.0/24:9400",), ("10.0.0.0/24:9400", "*.kv.svc")
    file.write_text("peer_allow: ['10.0.0.0/24:9400', '*.kv.svc']\n")
    assert load({}, None, {}).peer_allow == ()
    assert load({}, file, {}).peer_allow == both
    assert from_env(PEER_ALLOW="10.0.0.0/24:9400, *.kv.svc").peer_allow == both
    assert load({"peer-allow": list(both)}, None, {}).peer_allow == both
    assert load({"peer-allow": list(one)}, file, {}).peer_allow == one
    assert load({"peer-allow": [""]}, file, {}).peer_allow == ()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peer_listen", "unix:///s", "host:port required"),
        ("peer_listen", "nonsense", "peer-listen"),
        ("peer_transports", "tcp,rdma", "shm,ucx,tcp"),
        ("peer_transports", ",", "shm,ucx,tcp"),
        ("ucx_tls", "", "ucx-tls"),
        ("peer_allow", "10.0.0.1/24", r"peer-allow: '10.0.0.1/24': .*host bits"),
        ("peer_allow", "10.0.0.1:9400,a b", r"peer-allow: 'a b': expected host:port"),
    ],
)
def test_bad_settings_of_peers(name: str, value: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        load({"listen": "unix:///s", name: value}, None, {})
