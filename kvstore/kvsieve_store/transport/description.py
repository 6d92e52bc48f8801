"""What a store says of its data plane to those that may read from it: over the control plane, and nowhere
else."""

from __future__ import annotations

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from kvsieve_store.addresses import TcpAddress, parse_address
from kvsieve_store.errors import InvalidRequestError

MAX_DESCRIPTION_BYTES = 1 << 20


class Segment(BaseModel):
    """A file of the store's memory, to be mapped by peers on its host. size: bytes. device, inode: of the
    file."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int = Field(gt=0)
    device: int
    inode: int


class Ucx(BaseModel):
    """How UCX reaches the store: the address of its worker, and per segment a remote key and its address
    there."""

    model_config = ConfigDict(frozen=True)

    worker: Base64Bytes
    keys: tuple[Base64Bytes, ...]
    bases: tuple[int, ...]
    sizes: tuple[int, ...]


class Description(BaseModel):
    """tcp: host:port of the listener. host: boot id. segments: empty when the memory is no file. ucx: if
    served."""

    model_config = ConfigDict(frozen=True)

    tcp: str
    host: str = ""
    segments: tuple[Segment, ...] = ()
    ucx: Ucx | None = None

    @property
    def address(self) -> TcpAddress:
        """`tcp`, parsed. Raises InvalidRequestError."""
        try:
            address = parse_address(self.tcp)
        except ValueError as error:
            raise InvalidRequestError(f"tcp: {error}") from None
        if not isinstance(address, TcpAddress):
            raise InvalidRequestError(f"tcp: {self.tcp!r} given, host:port required")
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
