"""Unix sockets: the path they get, and whose socket a store removes at its end."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvsieve_store.client.endpoint import grpc_target
from kvsieve_store.server.store import Store

from .conftest import Engine

MakeStore = Callable[..., Awaitable[Store]]


@pytest.mark.parametrize("name", ["%41 b.sock", "ü.sock", "a?b#c.sock", "100%.sock"])
async def test_a_path_is_taken_as_it_is(
    make_store: MakeStore, connect: Callable[[str], Engine], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "run" / name
    store = await make_store(listen=[f"unix://{path}"])
    assert sorted(os.listdir(path.parent)) == sorted([name, f"{name}.lock"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    engine = connect(grpc_target(store.endpoints[0]))
    await engine.attach()
    assert len(engine.credits) == 4


async def test_a_path_as_long_as_can_be(make_store: MakeStore, connect: Callable[[str], Engine]) -> None:
    directory = Path("/tmp") / f"kvsieve-{os.getpid()}"
    path = directory / ("d" * (105 - len(str(directory)) - 1)) / "s"
    assert len(str(path)) == 107
    try:
        store = await make_store(listen=[f"unix://{path}"])
        await connect(store.endpoints[0]).attach()
        await store.__aexit__(None, None, None)
        assert os.listdir(path.parent) == ["s.lock"]
    finally:
        path.with_name("s.lock").unlink()
        path.parent.rmdir()
        directory.rmdir()


async def test_a_store_leaves_the_socket_of_another(make_store: MakeStore, tmp_path: Path) -> None:
    store = await make_store()
    path = tmp_path / "run" / "kvsieve.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        await store.__aexit__(None, None, None)
        assert path.is_socket()
