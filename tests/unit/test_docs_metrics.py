"""docs/metrics.md names every metric of the connector."""

from __future__ import annotations

import re

from kvsieve_connector.stats import COUNTERS, GAUGES
from tests.conftest import ROOT


def test_every_metric_of_the_connector_is_documented_and_no_other() -> None:
    page = (ROOT / "docs/metrics.md").read_text().split("# Metrics of the connector")[1]
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    names = {name.removesuffix("_total") for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert names == COUNTERS.keys() | GAUGES.keys()
