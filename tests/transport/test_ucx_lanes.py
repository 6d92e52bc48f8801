"""Which way an endpoint goes, from what UCX says of it; and that a wire of TCP never carries one-sided
reads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve_store.transport.ucx import lanes
from kvsieve_store.transport.ucx.engine import TLS, Engine
from kvsieve_store.transport.ucx.link import UcxLink
from tests.transport.conftest import StartPeer, needs_ucx, private, soon
from tests.transport.peer import BLOCK, LOOPBACK

# As UCX 1.13 and 1.22 print them; those of RDMA are from its documentation and its sources.
LANE = "#                 lane[{i}]:  {i}:{name}/{device} md[0]    -> md[0]/{kind}/sysdev[255] {uses}\n"
TAILS = ["am am_bw#0 keepalive wireup", "seg 4294967295 am am_bw#0 keepalive wireup"]


def described(*found: tuple[str, str]) -> str:
    lines = [
        LANE.format(i=i, name=name, device="dev", kind=name.partition("_")[0], uses=uses)
        for i, (name, uses) in enumerate(found)
    ]
    return "#\n# UCP endpoint\n#\n#               peer: <no debug data>\n" + "".join(lines) + "#\n"


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", ["tcp", "cuda_copy", "something_new", "ud_mlx5"])
def test_what_is_not_known_to_be_safe_gets_messages(name: str, tail: str) -> None:
    assert lanes.choose(described((name, tail))) == "messages"
    assert lanes.choose(described((name, f"rma#0 {tail}"))) == "messages"


@pytest.mark.parametrize("name", ["rc_verbs", "rc_mlx5", "dc_mlx5", "srd"])
def test_rdma_reads_are_one_sided(name: str) -> None:
    assert lanes.choose(described((name, "rma#0 am am_bw#0 wireup"))) == "one-sided"
    assert lanes.choose(described((name, "rma#0 rma_bw#0"), ("ud_mlx5", "am keepalive"))) == "one-sided"
    assert lanes.choose(described((name, "am am_bw#0"))) == "messages"  # no lane for reads: they are emulated
    assert lanes.choose(described((name, "rma#0 am"), ("tcp", "keepalive"))) == "messages"
    assert lanes.choose(described((name, "rma#0"), ("ud_mlx5", "rma#1 am"))) == "messages"


def test_shared_memory_is_one_sided() -> None:
    assert lanes.choose(described(("sysv", "am am_bw#0"), ("posix", ""))) == "one-sided"
    assert lanes.choose(described(("posix", "am"), ("cma", "rma_bw#0"))) == "one-sided"
    assert lanes.choose(described(("posix", "am"), ("tcp", "wireup"))) == "messages"


@given(st.text(max_size=300))
def test_anything_else_gets_messages(text: str) -> None:
    assert lanes.choose(text) == "messages"


@needs_ucx
@pytest.mark.parametrize(
    ("tls", "way"),
    [("tcp", "messages"), ("posix,cma", "one-sided"), ("sysv", "one-sided"), ("^sm", "messages")],
)
def test_the_real_wire_decides(
    start_peer: StartPeer, tls: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process may have wishes for UCX, an inference engine's say; ours are for our context alone.
    monkeypatch.setenv("UCX_TLS", "tcp" if way == "one-sided" else "posix,cma")
    before = dict(os.environ)
    peer = start_peer(1 << 20, {"posix,cma": "ucx-posix", "sysv": "ucx-sysv"}.get(tls, "ucx-tcp"))
    engine, (memory, buffer) = Engine(tls, LOOPBACK), private(BLOCK)
    ucx = peer.description.ucx
    assert ucx is not None
    with UcxLink(engine, ucx, peer.token, memory, soon()) as link:
        assert link.way == way
        link.read(peer.token, np.array([[0, 0, BLOCK]], np.uint64), np.zeros(1, np.uint64), soon())
        assert buffer.any()
    engine.close()
    assert dict(os.environ) == before


@needs_ucx
@pytest.mark.parametrize(
    "tls",
    [TLS, "tcp", "tcp,self", "all", "sm", "shm", "posix,self", "sysv", "self", "^tcp", "^sm,tcp", "^posix"],
)
def test_ucx_has_nothing_to_warn_of(tls: str) -> None:
    """It writes to stderr, past the log: so it gets no setting of a transport that it was not to use."""
    code = f"from kvsieve_store.transport.ucx.engine import Engine; Engine({tls!r}).close()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
