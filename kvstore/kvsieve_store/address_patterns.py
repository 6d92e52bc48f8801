"""Patterns of addresses: which stores a request may name."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvsieve_store.addresses import TcpAddress, UnixAddress, parse_address

ANY = "*"

_EXPECTED = (
    "expected host:port, where host is an IP address, a network like 10.0.0.0/24, a name or *.domain, "
    "and may stand alone; unix:///path, unix:///folder/*, or * for every address"
)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
# Resolvers read these as numbers: 127.1 and 0x7f.1 are 127.0.0.1.
_NUMERIC = re.compile(r"(?:.*\.)?(?:\d+|0[xX][0-9a-fA-F]*)\.?")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AddressPattern:
    """One pattern. With none of the fields set it allows every address.

    folder: sockets in it. path: this socket. network: hosts by IP address; names are not resolved. name: a
    host by name, lower case; "*.domain" for those below a domain. port: None for every port.
    """

    folder: Path | None = None
    path: Path | None = None
    network: _Network | None = None
    name: str = ""
    port: int | None = None

    @staticmethod
    def parse(text: str) -> AddressPattern:
        """Raises ValueError."""
        if text == ANY:
            return AddressPattern()
        if text.startswith("unix:"):
            address = parse_address(text)
            assert isinstance(address, UnixAddress)
            if address.path.name == ANY:
                return AddressPattern(folder=address.path.parent)
            return AddressPattern(path=address.path)
        host, port = _split(text)
        if network := _network(host):
            return AddressPattern(network=network, port=port)
        if not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host):
            raise ValueError(f"{text!r}: {_EXPECTED}")
        return AddressPattern(name=host.lower(), port=port)

    def allows(self, address: UnixAddress | TcpAddress) -> bool:
        if isinstance(address, UnixAddress):
            if self.folder or self.path:
                return address.path == self.path or address.path.parent == self.folder
            return self == AddressPattern()
        if self.folder or self.path or self.port not in (None, address.port):
            return False
        if self.network is not None:
            return _is_in(address.host, self.network)
        host = address.host.lower().removesuffix(".")
        if self.name.startswith("*."):
            return host.endswith(self.name[1:])
        return self.name in ("", host)


def allows(patterns: Iterable[AddressPattern], address: UnixAddress | TcpAddress) -> bool:
    """Whether one of them does."""
    return any(pattern.allows(address) for pattern in patterns)


def _split(text: str) -> tuple[str, int | None]:
    """Host or network, without brackets, and port. Raises ValueError."""
    text = text.removeprefix("tcp://")
    match = re.fullmatch(r"\[([^\[\]]+)\](?::(\d{1,5}))?", text)
    match = match or re.fullmatch(r"([^\[\]:\s]+)(?::(\d{1,5}))?", text)
    if match is None and text.count(":") > 1:
        match = re.fullmatch(r"([0-9a-fA-F:./]+)()", text)  # IPv6 without brackets has no port
    if match is None or not 1 <= int(match[2] or 1) <= 65_535:
        raise ValueError(f"{text!r}: {_EXPECTED}")
    return match[1], int(match[2]) if match[2] else None


def _network(host: str) -> _Network | None:
    """None for a name. Raises ValueError for a network that is none."""
    try:
        return ipaddress.ip_network(host)
    except ValueError as error:
        if "/" in host or ":" in host:
            raise ValueError(f"{host!r}: {error}") from None
        return None


def _is_in(host: str, network: _Network) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip in network
