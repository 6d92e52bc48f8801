from kvsieve.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("pool_id", "keys", "lease_ms", "digests", "wait_ms", "pool", "coming")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    keys: bytes
    lease_ms: int
    digests: bool
    wait_ms: int
    pool: _store_pb2.PoolSpec
    coming: bool
    def __init__(self, pool_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., digests: bool = ..., wait_ms: _Optional[int] = ..., pool: _Optional[_Union[_store_pb2.PoolSpec, _Mapping]] = ..., coming: bool = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("blocks", "token", "slot_bytes", "description", "digests", "pool", "coming")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    token: bytes
    slot_bytes: int
    description: bytes
    digests: bytes
    pool: _store_pb2.PoolSpec
    coming: int
    def __init__(self, blocks: _Optional[int] = ..., token: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ..., description: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., pool: _Optional[_Union[_store_pb2.PoolSpec, _Mapping]] = ..., coming: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("token", "done", "seen", "step", "wait_ms", "known")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    done: int
    seen: int
    step: int
    wait_ms: int
    known: int
    def __init__(self, token: _Optional[bytes] = ..., done: _Optional[int] = ..., seen: _Optional[int] = ..., step: _Optional[int] = ..., wait_ms: _Optional[int] = ..., known: _Optional[int] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("layers", "digests")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("token", "lease_ms")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    lease_ms: int
    def __init__(self, token: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("token", "taken")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    taken: int
    def __init__(self, token: _Optional[bytes] = ..., taken: _Optional[int] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("session_id", "source", "keys", "parent", "timeout_ms", "wait_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    source: str
    keys: bytes
    parent: bytes
    timeout_ms: int
    wait_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., source: _Optional[str] = ..., keys: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("present", "pulled", "damaged", "reason")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    present: int
    pulled: int
    damaged: int
    reason: str
    def __init__(self, present: _Optional[int] = ..., pulled: _Optional[int] = ..., damaged: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("session_id", "keys", "hold_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    keys: bytes
    hold_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: int
    def __init__(self, held: _Optional[int] = ...) -> None: ...
