"""Names that clients chose can't steer the terminal of who lists them."""

from __future__ import annotations

import pytest

from kvsieve_store.cli.output import print_error, printable


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("llama é 模型", "llama é 模型"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("two\nlines\t", r"two\nlines\t"),
        ("\u202ereversed", r"\u202ereversed"),
    ],
)
def test_control_characters_are_spelled_out(given: str, shown: str) -> None:
    assert printable(given) == shown


def test_an_error_keeps_its_lines_and_loses_its_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("first\nsecond \x1b]0;title\x07")
    assert capsys.readouterr().err == "kvsieve: first\nsecond \\x1b]0;title\\x07\n"
