"""docs/pd-proxy.md has every setting with its default, and every metric."""

from __future__ import annotations

import dataclasses

from kvsieve_pd.proxy.metrics import Metrics
from kvsieve_pd.proxy.settings import ProxySettings
from tests.conftest import ROOT

DOCS = (ROOT / "docs/pd-proxy.md").read_text()


def test_settings() -> None:
    section = DOCS.partition("## Settings")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `--")]
    for field in dataclasses.fields(ProxySettings):
        if not field.init:
            continue
        (row,) = (row for row in rows if f"`--{field.name.replace('_', '-')}`" in row.split("|")[1])
        if field.name not in ("prefill", "decode"):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert default in row.split("|")[2].replace("`", "").replace(" ", "").split(","), row


def test_metrics() -> None:
    for family in Metrics().registry.collect():
        name = family.name.removeprefix("kvsieve_proxy_")
        assert f"`{name}_total`" in DOCS or f"`{name}`" in DOCS, name
