"""Addresses that the store listens on."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvsieve_store.errors import SettingsError

MAX_SOCKET_PATH = 107
"""Bytes; what the kernel takes (unix(7))."""


def default_socket(environ: Mapping[str, str] | None = None) -> Path:
    """Where the store listens and clients look when nothing is said. Raises SettingsError without a place."""
    if os.geteuid() == 0 or os.access("/run/kvsieve", os.W_OK):
        return Path("/run/kvsieve/kvsieve.sock")
    runtime_dir = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR")
    if not runtime_dir:
        raise SettingsError(
            "listen: no default socket, since /run/kvsieve is not writable and XDG_RUNTIME_DIR is not set; "
            "give one, as in --listen unix:///path/kvsieve.sock"
        )
    return Path(runtime_dir) / "kvsieve" / "kvsieve.sock"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket, by absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"

    @property
    def grpc_target(self) -> str:
        """As gRPC takes it, on both sides: it decodes %41 in a path."""
        return f"unix:{quote(os.fsencode(self.path))}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP address. Port 0: the kernel picks one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host_port}"

    @property
    def host_port(self) -> str:
        """host:port, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unspecified(self) -> bool:
        """Whether it is all of a host's addresses: good to listen on, not to connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """The address that "unix:///path", "tcp://host:port" or "host:port" names. Raises ValueError."""
    if text.startswith("unix:"):
        # unix:///path as a URL, unix:/path as gRPC writes it.
        rest = text.removeprefix("unix:").removeprefix("//")
        path = Path(rest)
        if not rest.startswith("/") or path == Path("/"):
            raise ValueError(
                f"{text!r}: a unix socket needs an absolute path, as in unix:///run/kvsieve/kvsieve.sock"
            )
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError(f"{text!r}: the path of a unix socket has at most {MAX_SOCKET_PATH} bytes")
        return UnixAddress(path)
    match = re.fullmatch(r"(?:tcp://)?(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise ValueError(f"{text!r}: expected unix:///path or host:port")
    return TcpAddress(match[1] or match[2], int(match[3]))
