"""ConnectorSettings: what a value that makes no sense is told."""

from __future__ import annotations

from typing import Any

import pytest

from kvsieve_connector.settings import PREFIX, ConnectorSettings, parse_settings

NUMBERS = ("connect_timeout_ms", "match_timeout_ms", "credits", "hot_rows", "window_blocks")

NONSENSE = ([], {}, "maybe", "", -1, 1.5, float("nan"), 10**30, b"\xff", object)


@pytest.mark.parametrize("name", ConnectorSettings.model_fields)
@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_a_value_is_taken_or_refused_by_its_setting_s_name(name: str, value: Any) -> None:
    try:
        taken = getattr(parse_settings({PREFIX + name: value}), name)
    except ValueError as error:
        told = str(error)
        assert told.startswith(f"kv_connector_extra_config: {PREFIX}{name}: ")
        assert told.count(PREFIX) == 1
        assert f"got {value!r}" in told
    else:
        assert taken == value


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False])
def test_true_is_no_number(name: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"{PREFIX}{name}: a number is expected, got {value}"):
        parse_settings({PREFIX + name: value})


@pytest.mark.parametrize("value", ["maybe", "true", "AUTO", 1, 0, 2, None, ""])
def test_sharded_fetch_is_true_false_or_auto(value: object) -> None:
    with pytest.raises(ValueError, match=f'{PREFIX}sharded_fetch: true, false or "auto" is expected, got'):
        parse_settings({f"{PREFIX}sharded_fetch": value})


@pytest.mark.parametrize("value", [" ", " m@1", "m@1\n", "a\nb", "a\0", "\x1b[1m", "a\u202eb"])
def test_a_model_id_is_printable(value: str) -> None:
    with pytest.raises(ValueError, match=f"{PREFIX}model_id: printable characters"):
        parse_settings({f"{PREFIX}model_id": value})
    assert parse_settings({f"{PREFIX}model_id": "Modell ä@1"}).model_id == "Modell ä@1"


def test_a_pool_has_a_name() -> None:
    with pytest.raises(ValueError, match=f"{PREFIX}pool: "):
        parse_settings({f"{PREFIX}pool": ""})


def test_keys_of_others_are_left_alone() -> None:
    assert parse_settings({"other": 1, 7: 2, "kvsievish.mode": 3}) == ConnectorSettings()  # type: ignore[dict-item]
