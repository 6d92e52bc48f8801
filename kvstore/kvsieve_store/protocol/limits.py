"""Limits of protocol version 1. The store enforces them; clients learn them from Welcome."""

PROTOCOL_VERSION = 1

KEY_BYTES = 32
"""A key: vLLM's chained block hash, SHA-256."""

SESSION_ID_BYTES = 16

MAX_MATCH_KEYS = 32_768
"""Keys in one Match: half a million tokens at 16 tokens a block, 1 MiB on the wire."""

MAX_BATCH = 4_096
"""Entries in one Reserve, Seal or Release."""

MAX_CREDITS = 16_384
"""Largest credit target of a session, slots."""

MAX_LEASE_MS = 600_000

MAX_LEASED = 4_194_304
"""Slots in all leases of a session together; a slot counts once in each lease."""

MAX_LEASES = 65_536
"""Leases of a session at a time. One for each request is enough: a lease grows (SealRequest.lease_id)."""

MAX_PLANES = 16
"""Planes of a pool."""

MAX_LAYERS = 1_024
"""Layers of a plane."""

MAX_HEADS = 4_096
"""KV heads of a plane."""

MIN_RUN_BYTES = 4_096
"""Of a head, in a row: a plane with shorter runs is not cut for another TP size. A request has at most 1,024
ranges, so that 4 MiB and more go with each."""

DEFAULT_DRAIN_MS = 30_000
"""How long Drain waits for leases when it is not told."""

MAX_SESSIONS = 1_024
