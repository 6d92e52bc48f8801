"""The parts of the demo that need no engine: document, child processes, models, requests, report."""

from __future__ import annotations

import http.server
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvsieve_connector.demo import document, report
from kvsieve_connector.demo.engine import Answer, Engine, wait_for
from kvsieve_connector.demo.model import build_once
from kvsieve_connector.demo.processes import Child, DemoError, tail
from kvsieve_connector.demo.scenario import Result, Run
from kvsieve_connector.demo.steps import Steps

# document


def words(text: str) -> int:
    return len(text.split())


def test_the_document_is_about_as_long_as_asked_and_hides_the_fact_once() -> None:
    text = document.harbour_log(words, 3000)
    assert 2700 <= words(text) <= 3300
    assert text.count(document.FACT) == 1
    assert 0.3 < text.index(document.FACT) / len(text) < 0.5


def test_the_document_is_the_same_each_time() -> None:
    assert document.harbour_log(words, 500) == document.harbour_log(words, 500)


def test_the_question_comes_last() -> None:
    assert document.prompt("text", "why?").startswith("text\n")


# child processes


def child(tmp_path: Path, *command: str) -> Child:
    return Child("helper", command, tmp_path / "log", os.environ)


def test_a_child_s_whole_group_is_killed(tmp_path: Path) -> None:
    group = child(tmp_path, "sh", "-c", "sleep 60 & echo started; wait")
    group.wait_until(lambda: tail(group.log) == "started", 20)
    assert group.alive()
    group.kill()
    assert not group.alive()


def test_a_child_that_ends_early_is_an_error_with_its_log(tmp_path: Path) -> None:
    with child(tmp_path, "sh", "-c", "echo no luck; exit 3") as failing:
        with pytest.raises(DemoError, match="status 3") as caught:
            failing.wait_until(lambda: False, 20)
        assert caught.value.log is not None
        assert tail(caught.value.log) == "no luck"


def test_a_child_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    with child(tmp_path, "sleep", "60") as slow:
        with pytest.raises(DemoError, match="not ready within"):
            slow.wait_until(lambda: False, 0.1)
        with pytest.raises(DemoError, match="not done within"):
            slow.wait(0.1)


def test_a_child_that_does_well(tmp_path: Path) -> None:
    with child(tmp_path, "true") as good:
        good.wait(20)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsieve_connector.demo.processes._END_SECONDS", 0.2)
    stubborn = child(tmp_path, "sh", "-c", "trap '' TERM; echo started; sleep 60")
    stubborn.wait_until(lambda: stubborn.log.read_text() != "", 20)
    stubborn.close()
    assert not stubborn.alive()


# models


def test_a_model_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "config.json").touch()

    for _ in range(2):
        assert build_once(tmp_path / "model", build) == tmp_path / "model"
    assert len(built) == 1
    assert (tmp_path / "model/config.json").exists()


def test_a_build_that_failed_leaves_no_model(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    assert list(build_once(tmp_path / "model", lambda folder: None).iterdir()) == []


# requests


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM's server does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(json.dumps({"count": len(body["prompt"].split())}))
            return
        if body["messages"][0]["content"] == "fail":
            self.send_error(400, "too long")
            return
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": part}}]} for part in ("The key ", "is 1.")]
        events += [{"choices": [], "usage": {"prompt_tokens": 42}}]
        self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.reply(
            "# TYPE hits counter\n"
            'hits_total{engine="0"} 3.0\nhits_total{engine="1"} 4.0\n# TYPE other counter\nother_total 9.0\n'
        )

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An Engine whose server is the fake one."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setattr("kvsieve_connector.demo.engine.free_port", lambda: server.server_address[1])
    monkeypatch.setattr("sys.executable", "true")
    made = Engine(tmp_path, "unix:///s", tmp_path / "log")
    yield made
    made.child.close()
    server.shutdown()
    server.server_close()


def test_an_answer_is_put_together_from_its_events(engine: Engine) -> None:
    answer = engine.ask("question")
    assert (answer.text, answer.prompt_tokens) == ("The key is 1.", 42)
    assert answer.ttft > 0


def test_a_refused_request_says_why(engine: Engine) -> None:
    with pytest.raises(DemoError, match="too long"):
        engine.ask("fail")


def test_counters_are_summed_over_labels(engine: Engine) -> None:
    assert engine.counter("hits_total") == 7
    assert engine.counter("none_total") == 0
    assert engine.count_tokens("a b c") == 3


def test_waiting_ends_with_enough_or_with_the_time() -> None:
    values = iter([0.0, 1.0, 5.0])
    assert wait_for(lambda: next(values), 5, 60) == 5
    assert wait_for(lambda: 1.0, 5, 0.05) == 1


# report


def result(second_answer: str = "48217", matched: int = 256) -> Result:
    first = Run(Answer("48217", 10.0, 300), 0, 0)
    second = Run(Answer(second_answer, 1.0, 300), matched, matched << 10)
    return Result(first, second, block_tokens=128, slot_bytes=1 << 20, sealed_blocks=2)


def test_a_result_is_good_only_with_equal_answers_and_use_of_the_store() -> None:
    assert result().same_answer
    assert result().used_store
    assert not result(second_answer="12345").same_answer
    assert not result(matched=0).used_store


def test_the_report_shows_both_runs() -> None:
    out = io.StringIO()
    report.show(Console(file=out, width=100), result())
    shown = out.getvalue()
    for part in ("10.00 s", "1.00 s", "same answer: yes", "0.10 of the first", "256"):
        assert part in shown


def test_steps_say_what_was_done_and_ask_for_shares() -> None:
    out = io.StringIO()
    asked: list[float] = []

    def share() -> float:
        asked.append(0.5)
        return 0.5

    with Steps(Console(file=out, force_terminal=True)).step("count sheep", share):
        deadline = time.monotonic() + 20
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
    assert asked
    assert "count sheep" in out.getvalue()
