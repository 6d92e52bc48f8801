"""StateSettings: what the state machine has to know of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StateSettings:
    """Sizes, limits and watermarks.

    extent_bytes, extents: the arena's unit of ownership and how many there are.
    pool_quota_bytes: most bytes that a pool may own; 0: the whole arena. quotas: the same by pool name.
    session_timeout: seconds of silence after which a session is to be ended.
    max_sessions: most sessions, those that wait for fencing included.
    free_low, free_high: shares of a pool's slots. When fewer than free_low are free and the pool can't grow,
    the tick evicts until free_high are.
    """

    extent_bytes: int
    extents: int
    pool_quota_bytes: int = 0
    quotas: Mapping[str, int] = field(default_factory=dict)
    session_timeout: float = 10.0
    max_sessions: int = 1024
    free_low: float = 0.02
    free_high: float = 0.05
