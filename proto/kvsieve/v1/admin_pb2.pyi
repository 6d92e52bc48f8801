from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "instance", "uptime_seconds", "state", "prefaulted", "arena_bytes", "owned_bytes", "sealed_bytes", "pools", "sessions", "sealed_blocks", "leases", "rss_bytes", "listen", "arena_dir", "directory", "directory_down", "directory_address", "directory_queued")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_DIR_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_DOWN_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_QUEUED_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: bytes
    uptime_seconds: float
    state: str
    prefaulted: float
    arena_bytes: int
    owned_bytes: int
    sealed_bytes: int
    pools: int
    sessions: int
    sealed_blocks: int
    leases: int
    rss_bytes: int
    listen: _containers.RepeatedScalarFieldContainer[str]
    arena_dir: str
    directory: str
    directory_down: str
    directory_address: str
    directory_queued: int
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[bytes] = ..., uptime_seconds: _Optional[float] = ..., state: _Optional[str] = ..., prefaulted: _Optional[float] = ..., arena_bytes: _Optional[int] = ..., owned_bytes: _Optional[int] = ..., sealed_bytes: _Optional[int] = ..., pools: _Optional[int] = ..., sessions: _Optional[int] = ..., sealed_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., listen: _Optional[_Iterable[str]] = ..., arena_dir: _Optional[str] = ..., directory: _Optional[str] = ..., directory_down: _Optional[str] = ..., directory_address: _Optional[str] = ..., directory_queued: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "engine_id", "client", "pid", "pool", "age_seconds", "idle_seconds", "held_slots", "leases", "state")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session: str
    engine_id: str
    client: str
    pid: int
    pool: str
    age_seconds: float
    idle_seconds: float
    held_slots: int
    leases: int
    state: str
    def __init__(self, session: _Optional[str] = ..., engine_id: _Optional[str] = ..., client: _Optional[str] = ..., pid: _Optional[int] = ..., pool: _Optional[str] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., held_slots: _Optional[int] = ..., leases: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolInfo(_message.Message):
    __slots__ = ("pool_id", "name", "model", "dtype", "block_tokens", "hash_algo", "layout", "tp_size", "slot_bytes", "owned_bytes", "quota_bytes", "free_slots", "writing_slots", "sealed_blocks", "leased_blocks", "pinned_blocks", "sessions", "matched_blocks", "evicted_blocks")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGO_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WRITING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    name: str
    model: str
    dtype: str
    block_tokens: int
    hash_algo: str
    layout: str
    tp_size: int
    slot_bytes: int
    owned_bytes: int
    quota_bytes: int
    free_slots: int
    writing_slots: int
    sealed_blocks: int
    leased_blocks: int
    pinned_blocks: int
    sessions: int
    matched_blocks: int
    evicted_blocks: int
    def __init__(self, pool_id: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., hash_algo: _Optional[str] = ..., layout: _Optional[str] = ..., tp_size: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., owned_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., free_slots: _Optional[int] = ..., writing_slots: _Optional[int] = ..., sealed_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., sessions: _Optional[int] = ..., matched_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolInfo]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolInfo, _Mapping]]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("pool", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "parent", "slot", "generation", "leases", "pinned", "visited", "children")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    VISITED_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    slot: int
    generation: int
    leases: int
    pinned: bool
    visited: bool
    children: int
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., leases: _Optional[int] = ..., pinned: bool = ..., visited: bool = ..., children: _Optional[int] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("pool", "keys", "count")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    keys: bytes
    count: int
    def __init__(self, pool: _Optional[str] = ..., keys: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted", "skipped", "unknown")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    skipped: int
    unknown: int
    def __init__(self, evicted: _Optional[int] = ..., skipped: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("pool", "keys")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    keys: bytes
    def __init__(self, pool: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned", "unknown")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    unknown: int
    def __init__(self, pinned: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pool", "keys")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    keys: bytes
    def __init__(self, pool: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned", "unknown")
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    unknown: int
    def __init__(self, unpinned: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("dropped", "skipped")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    skipped: int
    def __init__(self, dropped: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("leases_left",)
    LEASES_LEFT_FIELD_NUMBER: _ClassVar[int]
    leases_left: int
    def __init__(self, leases_left: _Optional[int] = ...) -> None: ...
