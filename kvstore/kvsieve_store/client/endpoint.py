"""Where the client finds the store, in gRPC's words."""

from __future__ import annotations

from kvsieve_store.addresses import UnixAddress, parse_address
from kvsieve_store.errors import InvalidRequestError


def grpc_target(endpoint: str) -> str:
    """The gRPC target of "unix:///path", "tcp://host:port" or "host:port". Raises InvalidRequestError."""
    try:
        address = parse_address(endpoint)
    except ValueError as error:
        raise InvalidRequestError(f"endpoint: {error}") from None
    if isinstance(address, UnixAddress):
        return address.grpc_target
    if address.port == 0:
        raise InvalidRequestError(f"endpoint: {endpoint!r}: port 0 given, 1 to 65535 allowed")
    return f"dns:///{address.host_port}"
