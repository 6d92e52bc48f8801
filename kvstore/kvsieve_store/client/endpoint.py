"""Where the store listens: "unix:///path", "tcp://host:port" or "host:port"."""

from __future__ import annotations

import re

from kvsieve_store.errors import InvalidRequestError

_UNIX_PATH_BYTES = 107
"""sun_path of sockaddr_un, without the closing NUL."""

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


def grpc_target(endpoint: str) -> str:
    """The gRPC target of an endpoint. Raises InvalidRequestError, which says what is wrong with it."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        if endpoint.startswith("unix:") or "/" in endpoint:
            raise _invalid(endpoint, "a socket is written unix:///absolute/path")
        return _tcp(endpoint, endpoint)
    if scheme == "unix":
        return _unix(endpoint, rest)
    if scheme == "tcp":
        return _tcp(endpoint, rest)
    raise _invalid(endpoint, f"scheme {scheme!r} is not known")


def _unix(endpoint: str, path: str) -> str:
    if not path.startswith("/") or path.endswith("/"):
        raise _invalid(endpoint, "a socket is written unix:///absolute/path")
    if (size := len(path.encode())) > _UNIX_PATH_BYTES:
        raise _invalid(endpoint, f"the path has {size} bytes, a socket's path at most {_UNIX_PATH_BYTES}")
    return f"unix://{path}"


def _tcp(endpoint: str, address: str) -> str:
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        raise _invalid(endpoint, "a TCP address is written host:port, IPv6 as [::1]:port")
    if not 1 <= int(match["port"]) <= 65_535:
        raise _invalid(endpoint, f"port {match['port']} is not within 1 to 65535")
    return f"dns:///{address}"


def _invalid(endpoint: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"endpoint: {endpoint!r} given, {problem}; "
        "use unix:///run/kvsieve/kvsieve.sock, tcp://host:port or host:port"
    )
