from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SealStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEAL_STATUS_UNSPECIFIED: _ClassVar[SealStatus]
    SEAL_STATUS_SEALED: _ClassVar[SealStatus]
    SEAL_STATUS_DUPLICATE: _ClassVar[SealStatus]
SEAL_STATUS_UNSPECIFIED: SealStatus
SEAL_STATUS_SEALED: SealStatus
SEAL_STATUS_DUPLICATE: SealStatus

class Plane(_message.Message):
    __slots__ = ("name", "layer_bytes", "shards", "heads", "head_runs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_RUNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer_bytes: _containers.RepeatedScalarFieldContainer[int]
    shards: int
    heads: int
    head_runs: int
    def __init__(self, name: _Optional[str] = ..., layer_bytes: _Optional[_Iterable[int]] = ..., shards: _Optional[int] = ..., heads: _Optional[int] = ..., head_runs: _Optional[int] = ...) -> None: ...

class PoolSpec(_message.Message):
    __slots__ = ("name", "model", "dtype", "block_tokens", "hash_algo", "hash_seed", "layout", "tp_size", "planes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGO_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    dtype: str
    block_tokens: int
    hash_algo: str
    hash_seed: str
    layout: str
    tp_size: int
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., hash_algo: _Optional[str] = ..., hash_seed: _Optional[str] = ..., layout: _Optional[str] = ..., tp_size: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("path", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("instance", "extent_bytes", "segments")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    instance: bytes
    extent_bytes: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, instance: _Optional[bytes] = ..., extent_bytes: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Credits(_message.Message):
    __slots__ = ("slots", "generations")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "pool", "engine_id", "client", "credit_target", "pid")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TARGET_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    pool: PoolSpec
    engine_id: str
    client: str
    credit_target: int
    pid: int
    def __init__(self, protocol_version: _Optional[int] = ..., pool: _Optional[_Union[PoolSpec, _Mapping]] = ..., engine_id: _Optional[str] = ..., client: _Optional[str] = ..., credit_target: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("renew_leases",)
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    renew_leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, renew_leases: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_match_keys", "max_batch", "max_lease_ms", "max_credits")
    MAX_MATCH_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_CREDITS_FIELD_NUMBER: _ClassVar[int]
    max_match_keys: int
    max_batch: int
    max_lease_ms: int
    max_credits: int
    def __init__(self, max_match_keys: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_lease_ms: _Optional[int] = ..., max_credits: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "pool_id", "arena", "slot_bytes", "slots_per_extent", "slots_offset", "lock_path", "heartbeat_interval_ms", "session_timeout_ms", "limits", "credits", "store_version", "peer_address", "directory", "max_slots")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_EXTENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    STORE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    pool_id: bytes
    arena: Arena
    slot_bytes: int
    slots_per_extent: int
    slots_offset: int
    lock_path: str
    heartbeat_interval_ms: int
    session_timeout_ms: int
    limits: Limits
    credits: Credits
    store_version: str
    peer_address: str
    directory: bool
    max_slots: int
    def __init__(self, session_id: _Optional[bytes] = ..., pool_id: _Optional[bytes] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ..., slot_bytes: _Optional[int] = ..., slots_per_extent: _Optional[int] = ..., slots_offset: _Optional[int] = ..., lock_path: _Optional[str] = ..., heartbeat_interval_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., store_version: _Optional[str] = ..., peer_address: _Optional[str] = ..., directory: bool = ..., max_slots: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "credits", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    credits: Credits
    draining: Draining
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("session_id", "keys", "lease_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    keys: bytes
    lease_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("slots", "generations", "lease_id")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    lease_id: int
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "count")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    count: int
    def __init__(self, session_id: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("credits",)
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: Credits
    def __init__(self, credits: _Optional[_Union[Credits, _Mapping]] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("session_id", "keys", "parents", "slots", "generations", "lease_ms", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    keys: bytes
    parents: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    lease_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ("status", "credits", "lease_id")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    status: _containers.RepeatedScalarFieldContainer[SealStatus]
    credits: Credits
    lease_id: int
    def __init__(self, status: _Optional[_Iterable[_Union[SealStatus, str]]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("session_id", "keys", "slots", "generations", "hold_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    keys: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    hold_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids", "slots", "generations")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("leases", "slots")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    leases: int
    slots: int
    def __init__(self, leases: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...
