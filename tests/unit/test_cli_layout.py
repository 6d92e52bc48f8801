"""Listings: tables where they fit, one block a row where not; and no cell is broken."""

from __future__ import annotations

import pytest

from kvsieve_store.cli.listings import short_engine, short_name
from kvsieve_store.cli.output import Column, layout

COLUMNS = (
    Column("NAME", lambda row: row[0]),
    Column("SIZE", lambda row: row[1], right=True),
    Column("STATE", lambda row: row[2]),
)
ROWS = [("a", "10", "ok"), ("a-long-name", "9", "gone")]
TABLE = ["NAME         SIZE  STATE", "a              10  ok", "a-long-name     9  gone"]


@pytest.mark.parametrize("width", [None, 200, max(map(len, TABLE))])
def test_a_table_that_fits(width: int | None) -> None:
    assert [line.plain for line in layout(ROWS, COLUMNS, width)] == TABLE


def test_one_block_a_row_where_the_table_does_not_fit() -> None:
    assert [line.plain for line in layout(ROWS, COLUMNS, max(map(len, TABLE)) - 1)] == [
        "name: a",
        "size: 10",
        "state: ok",
        "",
        "name: a-long-name",
        "size: 9",
        "state: gone",
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/models/smollm2-135m-instruct-1", ".../smollm2-135m-instruct-1"),
        ("./models/a/", ".../a"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("tests", "tests"),
    ],
)
def test_names_of_pools(name: str, short: str) -> None:
    assert short_name(name) == short


def test_names_of_engines() -> None:
    assert short_engine("f81d4fae-7dec-11d0-a765-00a0c91e6bf6_dp0") == "f81d4fae_dp0"
    assert short_engine("vllm-0") == "vllm-0"
