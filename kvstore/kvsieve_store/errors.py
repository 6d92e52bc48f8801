"""Every error that the store, its client and the CLI raise on purpose, and what each becomes on the wire.

A message says what was given, what the limit is, and what to do. Raising one has changed no state.
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class KVSieveError(Exception):
    """Base of all errors of this package."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL


class InvalidRequestError(KVSieveError):
    """A field is malformed or over its limit. The message starts with the field's name."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(KVSieveError):
    """No such session, pool or block."""

    code = grpc.StatusCode.NOT_FOUND


class SlotNotHeldError(KVSieveError):
    """A slot that the session does not hold, or holds under another generation."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class PoolMismatchError(KVSieveError):
    """The pool name is taken by another spec, or the protocol version is not spoken. Names both values."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class CapacityError(KVSieveError):
    """It does not fit: the arena in memory, a slot in an extent, another session."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(KVSieveError):
    """The store can't serve now: prefaulting, draining, or not reachable. Try again."""

    code = grpc.StatusCode.UNAVAILABLE


class LinkError(UnavailableError):
    """The link to a peer store broke, or the peer did not answer in time. Trying again may help."""


class DamagedError(KVSieveError):
    """Bytes that came from a peer are not those that it sent off: their digest differs."""

    code = grpc.StatusCode.DATA_LOSS


class SettingsError(KVSieveError):
    """A setting is unknown or has no meaning. The message names it."""


_BY_CODE: dict[grpc.StatusCode, type[KVSieveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def from_rpc_error(error: grpc.RpcError, precondition: type[KVSieveError] = SlotNotHeldError) -> KVSieveError:
    """The error of this package that a failed call stands for.

    FAILED_PRECONDITION means another thing per call: `precondition` says which.
    """
    code = error.code()
    kind = precondition if code is grpc.StatusCode.FAILED_PRECONDITION else _BY_CODE.get(code, KVSieveError)
    return kind(error.details() or code.name)
