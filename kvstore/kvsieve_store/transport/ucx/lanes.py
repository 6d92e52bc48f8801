"""Which way an endpoint goes: what UCX really chose for it, not what it was asked for."""

from __future__ import annotations

import re
from typing import Literal

Way = Literal["one-sided", "messages"]

RDMA = re.compile(r"rc_verbs|rc_mlx5|dc_mlx5|gga_mlx5|srd")
"""Reads without any part of the peer's process."""

SHARED_MEMORY = re.compile(r"self|sysv|posix|cma|xpmem|knem")

BESIDE_RDMA = re.compile(r"ud_verbs|ud_mlx5")
"""For messages, and to set endpoints up."""

_LANE = re.compile(r"lane\[\d+\]:\s*\d+:(\w+)/(\S+)(.*)")


def lanes(description: str) -> list[tuple[str, str]]:
    """Transport and uses of each lane, from what ucp_ep_print_info() prints (the same from 1.13 to 1.22)."""
    return [(match[1], match[3]) for match in _LANE.finditer(description)]


def choose(description: str) -> Way:
    """One-sided only over RDMA, or over nothing but shared memory.

    Every lane has to be known. Over tcp UCX emulates reads with messages, and the process that is read from
    aborts when the reader dies in the middle (UCX 1.13 to 1.23); so a lane of tcp, or of anything new, means
    messages.
    """
    found = lanes(description)
    if found and all(SHARED_MEMORY.fullmatch(name) for name, _ in found):
        return "one-sided"
    known = (RDMA, SHARED_MEMORY, BESIDE_RDMA)
    reads = [name for name, uses in found if re.search(r"\brma#", uses)]
    if (
        reads
        and all(RDMA.fullmatch(name) for name in reads)
        and all(any(pattern.fullmatch(name) for pattern in known) for name, _ in found)
    ):
        return "one-sided"
    return "messages"
