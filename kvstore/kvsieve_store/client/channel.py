"""gRPC channel options that every client of the store uses, and what a failed call becomes."""

from __future__ import annotations

import grpc

from kvsieve_store.errors import KVSieveError, SlotNotHeldError, UnavailableError, from_rpc_error

_MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A store that hangs, or whose host vanished without closing its connections, is noticed within 5 s.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # The former is for TCP; a store that hangs, but whose kernel answers, is noticed by this one.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel really connects anew: the client's own back-off is the only one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


def call_error(
    error: grpc.RpcError, call: str, endpoint: str, precondition: type[KVSieveError] = SlotNotHeldError
) -> KVSieveError:
    """from_rpc_error, with the endpoint in the message of an UnavailableError, in plain words."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(f"{call}: no answer from the store at {endpoint} in time")
    mapped = from_rpc_error(error, precondition)
    if isinstance(mapped, UnavailableError):
        return UnavailableError(f"store at {endpoint}: {_plain(str(mapped))}")
    return mapped


def _plain(details: str) -> str:
    """gRPC's words for a connection that was not to be had, in plainer ones; other details as they are."""
    if not details.startswith("failed to connect to all addresses"):
        return details
    if "No such file or directory" in details:
        return "there is no such socket; is the store started (kvsieve serve)?"
    if "Connection refused" in details:
        return "nobody listens there; is the store started (kvsieve serve)?"
    if "Permission denied" in details:
        return "permission denied; engines run as the user who runs the store"
    return details.partition("last error: ")[2] or details
