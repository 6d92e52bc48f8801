"""Which transport reaches a peer: the best one that both have, found out when the link is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvsieve_store.errors import LinkError
from kvsieve_store.transport import shm
from kvsieve_store.transport.base import Link
from kvsieve_store.transport.description import Description
from kvsieve_store.transport.memory import Memory
from kvsieve_store.transport.tcp import TcpLink
from kvsieve_store.transport.ucx.engine import Engine
from kvsieve_store.transport.ucx.link import UcxLink

_log = logging.getLogger(__name__)

TRANSPORTS = ("shm", "ucx", "tcp")
"""Best first."""


def connect(
    peer: Description,
    token: bytes,
    memory: Memory,
    deadline: float,
    *,
    engine: Engine | None = None,
    transports: Sequence[str] = TRANSPORTS,
) -> Link:
    """A link by the first of `transports` that both sides have and that works.

    token: 16 bytes, of one of the peer's exports. memory: where the link's reads write to. deadline:
    time.monotonic() seconds. engine: of this process; without it there is no UCX.
    Raises LinkError when the peer is not reached, InvalidRequestError for a description that makes no sense.
    """
    for name in transports:
        if name == "shm" and peer.segments and peer.host == shm.boot_id():
            mapped = shm.map_peer(peer.segments)
            if mapped is not None:
                return shm.ShmLink(mapped, TcpLink(peer.address, memory, deadline))
        elif name == "ucx" and peer.ucx is not None and engine is not None:
            try:
                return UcxLink(engine, peer.ucx, token, memory, deadline)
            except LinkError as error:
                _log.warning("the peer at %s is not reached over UCX: %s", peer.tcp, error)
        elif name == "tcp":
            return TcpLink(peer.address, memory, deadline)
    raise LinkError(f"the peer at {peer.tcp} is reached by none of the transports {', '.join(transports)}")
