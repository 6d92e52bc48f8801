"""Which addresses a pattern allows, and which patterns are refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.address_patterns import AddressPattern, allows
from kvsieve_store.addresses import parse_address


def allowed(pattern: str, address: str) -> bool:
    return AddressPattern.parse(pattern).allows(parse_address(address))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("10.0.0.7:9400", ["10.0.0.7:9400", "tcp://10.0.0.7:9400"], ["10.0.0.7:9401", "10.0.0.8:9400"]),
        ("tcp://10.0.0.7:9400", ["10.0.0.7:9400"], ["10.0.0.7:9401"]),
        ("10.0.0.7", ["10.0.0.7:1", "10.0.0.7:65535", "[::ffff:10.0.0.7]:1"], ["10.0.0.70:1", "10.0.0:7"]),
        ("10.0.0.0/24", ["10.0.0.0:1", "10.0.0.255:9"], ["10.0.1.0:1", "[::1]:1", "a.example:1"]),
        ("10.0.0.0/24:9400", ["10.0.0.3:9400"], ["10.0.0.3:9401", "10.0.1.3:9400"]),
        ("127.0.0.0/8", ["127.0.0.1:1", "127.9.9.9:2"], ["a:1", "127.1:1", "0x7f.1:1", "2130706433:1"]),
        ("0.0.0.0/0", ["1.2.3.4:5"], ["a:5", "[::1]:5", "unix:///s"]),
        ("[fd00::/8]:9400", ["[fd00::1]:9400"], ["[fd00::1]:1", "[fe80::1]:9400", "10.0.0.1:9400"]),
        ("fd00::/8", ["[fd00::1]:1"], ["[fe80::1]:1"]),
        ("::1", ["[::1]:1", "[0:0:0:0:0:0:0:1]:1"], ["[::2]:1", "127.0.0.1:1"]),
        ("store-0.kv:9400", ["store-0.kv:9400", "STORE-0.KV:9400", "store-0.kv.:9400"], ["store-0.kv:1"]),
        ("localhost", ["localhost:1"], ["127.0.0.1:1", "localhost.evil.example:1", "xlocalhost:1"]),
        (
            "*.kv.svc:9400",
            ["a.kv.svc:9400", "a.b.KV.svc:9400"],
            ["kv.svc:9400", "xkv.svc:9400", "a.kv.svc:1"],
        ),
        ("unix:///run/a/s.sock", ["unix:///run/a/s.sock", "unix:/run/a/s.sock"], ["unix:///run/a/t.sock"]),
        (
            "unix:///run/a/*",
            ["unix:///run/a/s.sock"],
            ["unix:///run/a", "unix:///run/a/b/s.sock", "unix:///run/a/../s.sock", "unix:///run/ab/s.sock"],
        ),
        ("*", ["a:1", "1.2.3.4:5", "[::1]:1", "unix:///run/x.sock", "127.1:1"], []),
    ],
)
def test_what_a_pattern_allows(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [address for address in yes if not allowed(pattern, address)] == []
    assert [address for address in no if allowed(pattern, address)] == []
    if not pattern.startswith("unix:") and pattern != "*":
        assert not allowed(pattern, "unix:///run/x.sock")


@pytest.mark.parametrize(
    "pattern",
    [
        *("", " ", ":1", "a:", "a:0", "a:65536", "a:x", "a b", "a,b", "http://a:1", "a/b", "a:1:2"),
        *("10.0.0.7/24", "10.0.0.0/33", "10.0.0", "127.1:80", "0x7f.1", "300.1.1.1", "[::1", "[10.0.0.1:1]"),
        *("fd00::1:x", "[fd00::/200]:1", "**", "*a", "a.*", "*.", "*.*", "-a", "a..b", "unix:", "unix:x"),
        *("unix:///", "unix:///" + "a" * 200),
    ],
)
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unix|network|bits|not permitted|appear") as caught:
        AddressPattern.parse(pattern)
    assert pattern.split("/")[0].strip("[]") in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    with suppress(ValueError):
        AddressPattern.parse(text)


def test_nothing_is_allowed_by_no_pattern() -> None:
    assert not allows([], parse_address("127.0.0.1:1"))
    assert allows([AddressPattern.parse("a"), AddressPattern.parse("b:2")], parse_address("b:2"))
