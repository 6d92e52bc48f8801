"""Commands that talk to a store, against a real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvsieve_store.client import StoreClient
from tests.protocol.client_stores import SPEC, chain, store_thread, write_chain
from tests.unit.cli_run import Run, runner

KEYS = chain(5)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store without any engine, named by KVSIEVE_ENDPOINT."""
    with store_thread() as address:
        monkeypatch.setenv("KVSIEVE_ENDPOINT", address)
        yield address


@pytest.fixture
def client(endpoint: str) -> Iterator[StoreClient]:
    """An engine that is attached and has sealed a chain of five blocks."""
    with StoreClient(endpoint, SPEC, engine_id="engine-1") as client:
        client.start()
        client.wait_attached(20)
        write_chain(client, KEYS)
        yield client


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.mark.parametrize(("command", "says"), [("pools", "No pools"), ("sessions", "No sessions")])
def test_nothing_to_list_is_not_an_error(endpoint: str, run: Run, command: str, says: str) -> None:
    assert run(command).out.startswith(says)
    outcome = run(command, "--format", "json")
    assert (outcome.code, outcome.json) == (0, [])


def test_what_is_said_of_no_pools_is_true_after_an_engine_has_left(endpoint: str, run: Run) -> None:
    before = run("pools").out
    with StoreClient(endpoint, SPEC, engine_id="engine-1") as engine:
        engine.wait_attached(20)
        assert run("pools", "--format", "json").json
    while run("pools", "--format", "json").json:  # its session ends behind close()
        time.sleep(0.01)
    assert run("pools").out == before == "No pools: no engine is attached, and none has left blocks.\n"


def test_status(client: StoreClient, run: Run) -> None:
    table = run("status")
    assert (table.code, table.err) == (0, "")
    assert "ready" in table.out
    status = run("status", "--format", "json").json
    assert status["state"] == "ready"
    assert status["sealed_blocks"] == 5
    assert status["arena_bytes"] == 32 << 20
    assert len(bytes.fromhex(status["instance"])) == 16


def test_pools_and_sessions(client: StoreClient, run: Run) -> None:
    (pool,) = run("pools", "--format", "json").json
    assert (pool["name"], pool["pool_id"], pool["sealed_blocks"]) == ("tests", SPEC.pool_id().hex(), 5)
    assert SPEC.pool_id().hex()[:12] in run("pools").out
    (session,) = run("sessions", "--format", "json").json
    assert (session["engine_id"], session["pool"], session["state"]) == ("engine-1", "tests", "attached")
    assert "engine-1" in run("sessions").out


def test_blocks_by_name_and_by_id(client: StoreClient, run: Run) -> None:
    listed = run("blocks", "tests", "--format", "json").json
    assert {block["key"] for block in listed} == {key.hex() for key in KEYS}
    assert run("blocks", SPEC.pool_id().hex()[:8], "--format", "json").json == listed
    assert KEYS[0].hex()[:16] in run("blocks", "tests").out


def test_blocks_are_listed_up_to_the_limit(
    client: StoreClient, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsieve_store.cli.keys.PAGE", 2)
    assert len(run("blocks", "tests", "--limit", "3", "--format", "json").json) == 3
    assert len(run("blocks", "tests", "--limit", "0", "--format", "json").json) == 5


def test_evict_the_coldest(client: StoreClient, run: Run) -> None:
    outcome = run("evict", "tests", "--count", "2", "--format", "json")
    assert (outcome.code, outcome.json["evicted"]) == (0, 2)
    assert len(client.match(KEYS).refs) == 3


def test_evict_by_key_takes_the_children(client: StoreClient, run: Run) -> None:
    outcome = run("evict", "tests", "--key", KEYS[3].hex(), "--format", "json")
    assert (outcome.code, outcome.json) == (0, {"evicted": 2, "skipped": 0, "unknown": 0})


def test_a_pinned_block_is_not_evicted_until_unpinned(client: StoreClient, run: Run) -> None:
    assert run("pin", "tests", "--key", KEYS[4].hex()).code == 0
    outcome = run("evict", "tests", "--key", KEYS[0].hex(), "--format", "json")
    assert (outcome.code, outcome.json["evicted"]) == (1, 0)
    assert run("unpin", "tests", "--all", "--format", "json").json["unpinned"] == 1
    assert run("evict", "tests", "--key", KEYS[0].hex(), "--format", "json").json["evicted"] == 5


def test_a_key_may_be_given_by_its_first_digits(client: StoreClient, run: Run) -> None:
    pinned = run("pin", "tests", "--key", KEYS[1].hex()[:9].upper(), "--key", KEYS[4].hex())
    assert pinned.code == 0
    (listed,) = (b for b in run("blocks", "tests", "--format", "json").json if b["key"] == KEYS[1].hex())
    assert listed["pinned"]
    assert run("unpin", "tests", "--key", KEYS[1].hex()[:16]).code == 0


def test_first_digits_must_fit_one_block(client: StoreClient, run: Run) -> None:
    none = run("evict", "tests", "--key", "00000000")
    assert (none.code, none.err.count("\n")) == (1, 1)
    assert "no sealed block of tests" in none.err
    write_chain(client, [bytes(31) + b"\1", bytes(31) + b"\2"])
    two = run("evict", "tests", "--key", "00000000")
    assert (two.code, two.out) == (1, "")
    assert "2 blocks" in two.err
    assert len(run("blocks", "tests", "--format", "json").json) == 7


def test_an_unknown_pool_says_where_to_look(client: StoreClient, run: Run) -> None:
    assert "kvsieve pools" in run("blocks", "nope").err


def test_clear_wants_to_be_meant(client: StoreClient, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    outcome = run("clear", "tests")
    assert outcome.code == 2
    assert "--yes" in outcome.err
    assert len(client.match(KEYS).refs) == 5


def test_clear(client: StoreClient, run: Run) -> None:
    assert run("clear", "--yes", "--format", "json").json == {"dropped": 5, "skipped": 0}
    assert run("blocks", "tests").out.startswith("No sealed blocks")


@pytest.mark.parametrize(
    "command",
    [
        ["blocks", "nope"],
        ["evict", "nope", "--count", "1"],
        ["pin", "nope", "--key", KEYS[0].hex()],
        ["unpin", "nope", "--all"],
        ["clear", "nope", "--yes"],
        ["pin", "tests", "--key", "00" * 32],
        ["unpin", "tests", "--key", "00" * 32],
        ["evict", "tests", "--key", "00" * 32],
    ],
)
def test_what_is_not_there_is_a_failure(client: StoreClient, run: Run, command: list[str]) -> None:
    outcome = run(*command)
    assert outcome.code == 1
    assert outcome.err.count("\n") == ("nope" in command)


@pytest.mark.parametrize(
    "command",
    [
        ["evict", "tests"],
        ["evict", "tests", "--count", "1", "--key", KEYS[0].hex()],
        ["evict", "tests", "--count", "0"],
        ["pin", "tests"],
        ["pin", "tests", "--key", "xyz"],
        ["pin", "tests", "--key", "abcd"],
        ["unpin", "tests"],
        ["blocks", "tests", "--limit", "-1"],
        ["drain", "--timeout", "601"],
        ["status", "--format", "xml"],
        ["status", "--nonsense"],
        ["nonsense"],
    ],
)
def test_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("KVSIEVE_ENDPOINT", "unix:///nonexistent/s.sock")
    outcome = run(*command)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["status", "--format", "xml"], "'xml' is not one of 'table', 'json'"),
        (["evict", "tests", "--count", "x"], "a whole number is expected"),
        (["evict"], "POOL"),
    ],
)
def test_wrong_usage_is_told_in_plain_words(run: Run, command: list[str], says: str) -> None:
    outcome = run(*command)
    assert says in outcome.err
    assert "Value error" not in outcome.err
    assert "{pool}" not in outcome.err


@pytest.mark.parametrize("command", [["status"], ["pools"], ["sessions"], ["blocks", "p"], ["drain"]])
def test_no_store_is_one_line(run: Run, tmp_path: Any, command: list[str]) -> None:
    outcome = run(*command, "--endpoint", f"unix://{tmp_path}/s.sock")
    assert (outcome.code, outcome.out) == (1, "")
    assert f"{tmp_path}/s.sock" in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_endpoint_that_makes_no_sense_is_wrong_usage(run: Run) -> None:
    outcome = run("status", "--endpoint", "ftp://x")
    assert outcome.code == 2
    assert "ftp://x" in outcome.err


def test_the_endpoint_before_the_command_and_after_it(
    run: Run, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSIEVE_ENDPOINT")
    assert run("--endpoint", endpoint, "status").code == 0
    assert run("status", "--endpoint", endpoint).code == 0
    assert run("--endpoint", "unix:///nonexistent/s.sock", "status", "--endpoint", endpoint).code == 0


def test_drain(client: StoreClient, run: Run) -> None:
    outcome = run("drain", "--timeout", "5", "--format", "json")
    assert (outcome.code, outcome.json) == (0, {"leases_left": 0})


def test_drain_says_that_the_store_has_ended(client: StoreClient, run: Run) -> None:
    assert "has ended" in run("drain", "--timeout", "5").out


def test_drain_fails_when_leases_are_left(client: StoreClient, run: Run) -> None:
    client.match(KEYS)
    outcome = run("drain", "--timeout", "0.2", "--format", "json")
    assert (outcome.code, outcome.json) == (1, {"leases_left": 1})
