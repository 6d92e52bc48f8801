"""Frames of the data plane: the same bytes over TCP and in UCX active messages. Little-endian throughout.

    head    = u32 magic | u16 kind | u16 status | u64 id | u64 bytes of the body
    request = head, token (16 bytes), n x (u64 block | u64 offset | u64 length)
    reply   = head, body

A block is named by its place in the export that the token stands for, never by an address. READ is answered
with the ranges' bytes end to end, LOCATE with u64 per range, its offset in the memory of the store; CONFIRM
has no ranges and is answered with nothing: the export is still there. A reply of another status than OK has a
text for its body. The magic has the version in it: a peer of another version is refused by its first frame.

In an active message the head is the header, followed by u64 link: which link of the store a request comes by,
0 in a reply. HELLO, on UCX only, makes the link: its body is a token and the address of the asking worker,
and is answered with u64 link.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvsieve_store.errors import CapacityError, InvalidRequestError, KVSieveError, LinkError, NotFoundError

MAGIC = int.from_bytes(b"KVS\x01", "little")
TOKEN_BYTES = 16
RANGE_BYTES = 24

MAX_RANGES = 1024
"""Ranges of one request; as many pieces as one vectored system call takes (IOV_MAX)."""

MAX_READ_BYTES = 64 << 20
"""Bytes that one request may ask for."""

MAX_TEXT_BYTES = 1024
"""Of a refusal."""

MAX_BLOCKS = 1 << 20
"""Of one export."""

MAX_ADDRESS_BYTES = 8192
"""Of a UCX worker."""

MAX_REQUEST_BYTES = TOKEN_BYTES + MAX_RANGES * RANGE_BYTES

U64Array = NDArray[np.uint64]

_HEAD = struct.Struct("<IHHQQ")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """What is asked."""

    READ = 1
    LOCATE = 2
    CONFIRM = 3
    HELLO = 4


class Status(IntEnum):
    """How a request went."""

    OK = 0
    INVALID = 1
    UNKNOWN_EXPORT = 2
    BUSY = 3
    FAILED = 4


_ERRORS: dict[Status, type[KVSieveError]] = {
    Status.INVALID: InvalidRequestError,
    Status.UNKNOWN_EXPORT: NotFoundError,
    Status.BUSY: CapacityError,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The first 24 bytes of a frame. size: bytes of the body, which follows."""

    kind: Kind
    status: Status
    id: int
    size: int

    def pack(self) -> bytes:
        return _HEAD.pack(MAGIC, self.kind, self.status, self.id, self.size)

    @staticmethod
    def of(raw: bytes | bytearray | memoryview) -> Head:
        """Raises InvalidRequestError for bytes that are no head."""
        if len(raw) != HEAD_BYTES:
            raise InvalidRequestError(f"head: {len(raw)} bytes given, {HEAD_BYTES} required")
        magic, kind, status, number, size = _HEAD.unpack(raw)
        if magic != MAGIC:
            raise InvalidRequestError(f"magic: {magic:#010x} given, {MAGIC:#010x} required")
        try:
            return Head(Kind(kind), Status(status), number, size)
        except ValueError:
            raise InvalidRequestError(f"kind, status: {kind}, {status} given, which are unknown") from None


@dataclass(frozen=True, slots=True)
class Request:
    """What a peer asks. ranges: [n, 3] uint64: block, offset in it, length; none for CONFIRM."""

    kind: Kind
    token: bytes
    ranges: U64Array

    def body(self) -> bytes:
        return self.token + self.ranges.astype("<u8", copy=False).tobytes()

    @staticmethod
    def of(head: Head, body: bytes | memoryview) -> Request:
        """Raises InvalidRequestError, which names the field and the limit."""
        check_request_size(head)
        if len(body) != head.size:
            raise InvalidRequestError(f"body: {len(body)} bytes given, {head.size} announced")
        ranges = np.frombuffer(body, "<u8", offset=TOKEN_BYTES).reshape(-1, 3)
        if head.kind is Kind.HELLO or (head.kind is Kind.CONFIRM) == bool(len(ranges)):
            raise InvalidRequestError(f"ranges: {len(ranges)} given for {head.kind.name}")
        return Request(head.kind, bytes(body[:TOKEN_BYTES]), ranges)


def check_request_size(head: Head) -> None:
    """Raises InvalidRequestError unless the body can be that of a request."""
    count, rest = divmod(head.size - TOKEN_BYTES, RANGE_BYTES)
    if head.status is not Status.OK or count < 0 or rest or count > MAX_RANGES:
        raise InvalidRequestError(
            f"request: body of {head.size} bytes announced, a token of {TOKEN_BYTES} and up to {MAX_RANGES} "
            f"ranges of {RANGE_BYTES} allowed"
        )


def refusal(head: Head, error: KVSieveError) -> tuple[Head, bytes]:
    """The reply that says why a request was refused."""
    status = next((s for s, kind in _ERRORS.items() if isinstance(error, kind)), Status.FAILED)
    text = str(error).encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    return Head(head.kind, status, head.id, len(text)), text


def refused(status: Status, text: bytes) -> KVSieveError:
    """The error that a refusal stands for."""
    return _ERRORS.get(status, LinkError)(f"the peer says: {text.decode('utf-8', 'replace')}")
