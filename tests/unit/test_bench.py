"""The benchmarks run, on sizes that say nothing, and their results have what docs and plots read."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvsieve_store.bench import copying, handing_over, matching, memory, sealing, summary, transporting
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.saving import Load
from kvsieve_store.bench.store import TemporaryStore
from kvsieve_store.client import AdminClient
from kvsieve_store.errors import UnavailableError

CONDITIONS = {"cpu", "cores", "load_average", "kernel", "python", "kvsieve"}


@pytest.fixture(scope="module")
def bench_store() -> Iterator[TemporaryStore]:
    with TemporaryStore("--pool-size", "64MiB", "--extent-size", "4MiB") as store:
        yield store


def check(report: Report, rows: int, keys: set[str], goals: int) -> None:
    record = json.loads(json.dumps(report.record()))
    assert set(record) == {"name", "conditions", "parameters", "rows", "goals"}
    assert set(record["conditions"]) == CONDITIONS
    assert len(record["rows"]) == rows
    assert all(keys <= set(row) for row in record["rows"])
    assert len(record["goals"]) == goals
    assert all(set(goal) == {"what", "value", "limit", "unit", "at_least", "met"} for goal in record["goals"])


def test_copy(bench_store: TemporaryStore) -> None:
    geometries = [copying.Geometry("small", 3, 8192), copying.Geometry("odd", 2, 1000)]
    report = copying.measure(bench_store.endpoint, working_set=1 << 20, repetitions=2, geometries=geometries)
    keys = {f"{way}_{what}" for way in ("write", "read") for what in ("gb_s", "vs_pieces", "vs_flat")}
    check(report, 2, keys | {"geometry", "piece_bytes", "blocks"}, goals=2)


def test_transport() -> None:
    cases = [transporting.Case("few", 4, 4096, False, 0.9), transporting.Case("apart", 9, 700, True, 0.7)]
    report = transporting.measure(repetitions=2, cases=cases, idle_seconds=0.1, memory=4 << 20)
    links = 2 if report.parameters["ucx"] == "there" else 1
    check(Report("transport", {}, report.rows[:-1]), 2, {"case", "bytes", "tcp_gb_s", "tcp_vs_raw"}, goals=0)
    assert set(report.rows[-1]["idle_percent"]) == {"reader", "store"}
    assert len(report.goals) == 2 * links + 2


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable, "/bin/false"])
def test_transport_says_why_nixl_is_left_out(python: str) -> None:
    if python == sys.executable and importlib.util.find_spec("nixl_cu12"):
        pytest.skip("it is there")
    report = transporting.measure(
        repetitions=1, cases=[], idle_seconds=0.1, memory=1 << 20, nixl_python=python
    )
    assert report.parameters["nixl"].startswith("nixl: ")
    assert not any("NIXL" in goal.what for goal in report.goals)


def test_handoff() -> None:
    case = handing_over.Case(8192, step_blocks=2, steps=2, step_seconds=0.01, layers=4)
    report = handing_over.measure(
        cases=[case], stream=case, repetitions=2, matches=5, keys=20, transports=["tcp"], pool_size="256MiB"
    )
    keys = {"transport", "block_bytes", "last_blocks", "block_us", "pulled_p50_us", "p50_us", "p99_us"}
    keys |= {"sealed_only_p50_us", "ratio"}
    check(Report("handoff", {}, report.rows[:1]), 1, keys, goals=0)
    check(Report("handoff", {}, report.rows[1:]), 3, {"transport", "store", "pulls", "match_p99_us"}, goals=0)
    assert len(report.goals) == 2


def test_match(bench_store: TemporaryStore) -> None:
    loads = [matching.IDLE, Load(sessions=1, batch=8, rate=100)]
    report = matching.measure(bench_store.endpoint, keys=20, matches=5, pause=0.001, loads=loads)
    check(report, 2, {"savers", "saved_blocks_s", "p50_us", "p99_us", "max_us", "seconds"}, goals=1)
    assert all(len(row["seconds"]) == row["count"] == 5 for row in report.rows)


@pytest.mark.parametrize("credits", [0, 16])
def test_seal(bench_store: TemporaryStore, credits: int) -> None:
    report = sealing.measure(
        bench_store.endpoint, seconds=0.2, loads=[Load(sessions=2, batch=8, credits=credits)]
    )
    check(report, 1, {"sessions", "batch", "credits", "blocks_s", "short_batches"}, goals=0)
    assert report.rows[0]["blocks_s"] > 0


def test_memory() -> None:
    report = memory.measure(blocks=100)
    check(report, 2, {"blocks", "anonymous_mb", "files_mb", "rss_mb"}, goals=1)
    assert report.rows[0]["blocks"] == 0
    assert report.rows[1]["blocks"] >= 100


def test_summary_leaves_nothing_in_a_store_that_is_given(
    bench_store: TemporaryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(endpoint: str, console: Console) -> Iterator[Report]:
        yield sealing.measure(endpoint, seconds=0.1, loads=[Load(sessions=1, batch=8)])
        yield Report("x", {}, [], [Goal("speed", 3.0, 2.0, "x"), Goal("delay", 3.0, 2.0, "s", False)])

    monkeypatch.setattr(summary, "_short", short)
    console = Console(file=StringIO(), width=200)
    assert summary.run(bench_store.endpoint, console) == 0
    shown = console.file.getvalue()
    assert all(word in shown for word in ("speed", "met", "missed"))
    with AdminClient(bench_store.endpoint) as admin:
        assert admin.status().sealed_blocks == 0


def test_no_store_where_one_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def short(endpoint: str, console: Console) -> Iterator[Report]:
        raise AssertionError("nothing to measure")

    monkeypatch.setattr(summary, "_short", short)
    console = Console(file=StringIO())
    with pytest.raises(UnavailableError, match=str(tmp_path)):
        summary.run(f"unix://{tmp_path}/s.sock", console)
    assert console.file.getvalue() == ""


def test_table() -> None:
    console = Console(file=StringIO(), width=200)
    goals = [Goal("seal", 67_750.4, 20_000, "blocks/s"), Goal("copy", 0.91234, 0.9, "x")]
    summary.print_table(console, goals)
    shown = console.file.getvalue()
    assert all(text in shown for text in ("67,750 blocks/s", "20,000 blocks/s", "0.9123 x", "result"))
    assert all(line == line.rstrip() for line in shown.splitlines())


def test_goals() -> None:
    assert Goal("", 0.9, 0.9, "x").met
    assert not Goal("", 0.89, 0.9, "x").met
    assert Goal("", 1.9, 2, "ms", at_least=False).met
    assert not Goal("", 2, 2, "ms", at_least=False).met


def test_a_store_that_cannot_start_says_why() -> None:
    with pytest.raises(UnavailableError, match="at least one extent"), TemporaryStore("--pool-size", "4KiB"):
        pass


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.output import save

    row = {"sessions": 1, "batch": 8, "credits": 0, "blocks_s": 30_000, "short_batches": 0}
    report = Report("seal", {"seconds": 1}, [row], [Goal("seal", 30_000, 20_000, "blocks/s")])
    record = json.loads(save(report, tmp_path).read_text())
    assert record["rows"] == [row]
    assert (tmp_path / "seal.png").read_bytes().startswith(b"\x89PNG")
