"""The simulation of many hosts: the same each time, and no byte comes from nowhere."""

from __future__ import annotations

import dataclasses

import pytest

from bench.scale import Assumptions, simulate
from tests.unit.test_bench import check

SHORT = Assumptions(warm_s=60, measured_s=20)


def test_the_same_each_time() -> None:
    one, two = simulate(SHORT, (8,)), simulate(SHORT, (8,))
    assert one.rows == two.rows
    check(one, 1, {"hosts", "prefill_out_gb_s", "directory_ops_s", "used", "full_first"}, goals=0)


def test_a_single_host_has_no_link() -> None:
    (row,) = simulate(SHORT, (1,)).rows
    assert row["host_link_peak_gb_s"] == 0
    assert row["full_first"] == "prefill compute"


def test_what_goes_out_comes_in() -> None:
    """Without documents in common, all of a prompt goes from a prefill host to a decode host, once."""
    alone = dataclasses.replace(SHORT, documents_per_host=10**7)
    (row,) = simulate(alone, (8,)).rows
    tokens = row["requests_s"] / 4 * (alone.document_tokens + alone.own_tokens)
    assert row["prefill_out_gb_s"] == pytest.approx(row["decode_in_gb_s"], rel=0.2)
    assert row["prefill_out_gb_s"] == pytest.approx(tokens * alone.token_bytes / 1e9, rel=0.2)


def test_more_hosts_ask_more_of_the_directory() -> None:
    few, many = simulate(SHORT, (8, 64)).rows
    assert many["directory_ops_s"] > 4 * few["directory_ops_s"]
    assert many["directory_gb"] == pytest.approx(8 * few["directory_gb"], rel=0.05)
