"""docs/settings.md and docs/connector.md name every setting, with its default."""

from __future__ import annotations

import re

from kvsieve_connector.settings import PREFIX, ConnectorSettings
from kvsieve_store.settings import StoreSettings
from tests.conftest import ROOT

ROWS = {
    name: default.strip("`")
    for page in ("docs/settings.md", "docs/connector.md")
    for name, default in re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", (ROOT / page).read_text(), re.M)
}


def test_every_setting_is_documented_and_no_other() -> None:
    connector = {f"{PREFIX}{name}" for name in ConnectorSettings.model_fields}
    assert set(ROWS) == set(StoreSettings.model_fields) | connector


def test_defaults_are_those_of_the_code() -> None:
    for name, field in StoreSettings.model_fields.items():
        default = field.get_default()
        if default is None or default == {} or field.default_factory is not None:
            continue
        given = {"yes": True, "no": False}.get(ROWS[name], ROWS[name])
        listen = {"listen": ["unix:///s"]} | {name: given}
        assert getattr(StoreSettings.model_validate(listen), name) == default, name
    for name, field in ConnectorSettings.model_fields.items():
        if field.default is not None and field.default_factory is None:
            assert ROWS[f"{PREFIX}{name}"] == str(field.default).replace("True", "true").replace(
                "False", "false"
            ), name
