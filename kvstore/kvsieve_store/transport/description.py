"""What a store says of its data plane to those that may read from it: over the control plane, and nowhere
else."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence
from typing import Annotated

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvsieve_store.addresses import TcpAddress, parse_address
from kvsieve_store.errors import InvalidRequestError

MAX_DESCRIPTION_BYTES = 1 << 20
MAX_ADDRESS = 256

Word = Annotated[int, Field(ge=0, lt=1 << 62)]


class Segment(BaseModel):
    """A file of the store's memory, to be mapped by peers on its host. size: bytes. device, inode: of the
    file."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int = Field(gt=0)
    device: int
    inode: int


class Ucx(BaseModel):
    """How UCX reaches the store.

    worker: address of its worker. keys: a remote key per segment of its memory, or none: it is not to be read
    one-sided. bases: address of each segment in the store's process. sizes: bytes of each.
    """

    model_config = ConfigDict(frozen=True)

    worker: Base64Bytes
    keys: tuple[Base64Bytes, ...]
    bases: tuple[Word, ...]
    sizes: tuple[Word, ...]

    @model_validator(mode="after")
    def _check(self) -> Ucx:
        if len(self.bases) != len(self.sizes) or len(self.keys) not in (0, len(self.sizes)):
            raise ValueError("keys, bases, sizes: as many of each required")
        return self

    @staticmethod
    def of(worker: bytes, keys: Sequence[bytes], bases: Sequence[int], sizes: Sequence[int]) -> Ucx:
        encoded = tuple(base64.b64encode(key) for key in keys)
        return Ucx(worker=base64.b64encode(worker), keys=encoded, bases=tuple(bases), sizes=tuple(sizes))


class Description(BaseModel):
    """tcp: host:port of the listener, an IP address: nobody waits for a name that a peer made up. host: boot
    id. segments: empty when the memory is no file. ucx: if served."""

    model_config = ConfigDict(frozen=True)

    tcp: str = Field(max_length=MAX_ADDRESS)
    host: str = ""
    segments: tuple[Segment, ...] = ()
    ucx: Ucx | None = None

    @property
    def address(self) -> TcpAddress:
        """`tcp`, parsed. Raises InvalidRequestError."""
        try:
            address = parse_address(self.tcp)
            if not isinstance(address, TcpAddress):
                raise ValueError(f"{self.tcp!r} given, host:port required")
            ipaddress.ip_address(address.host)
        except ValueError as error:
            raise InvalidRequestError(f"description.tcp: {error}") from None
        return address

    def pack(self) -> bytes:
        """JSON."""
        return self.model_dump_json().encode()

    @staticmethod
    def of(raw: bytes) -> Description:
        """Raises InvalidRequestError."""
        if len(raw) > MAX_DESCRIPTION_BYTES:
            raise InvalidRequestError(
                f"description: {len(raw)} bytes given, at most {MAX_DESCRIPTION_BYTES} allowed"
            )
        try:
            return Description.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequestError(
                f"description.{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
