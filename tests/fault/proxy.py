"""A wire between an engine and its store that a test can cut, and mend."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class Proxy:
    """Carries bytes between its own unix socket and a store's. endpoint: for the engine."""

    def __init__(self, store_endpoint: str) -> None:
        self._store = store_endpoint.removeprefix("unix://")
        self._home = Path(tempfile.mkdtemp(prefix="kvsieve-proxy-"))
        self.endpoint = f"unix://{self._home}/s.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._home}/s.sock")
        self._listener.listen()
        self._lock = threading.Lock()
        self._whole = True
        self._wires: list[socket.socket] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Ends all connections, and from now on refuses new ones."""
        with self._lock:
            self._whole = False
            for wire in self._wires:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
            self._wires.clear()

    def mend(self) -> None:
        """New connections pass again."""
        with self._lock:
            self._whole = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._listener.close()
        shutil.rmtree(self._home)

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._listener.accept()
            except OSError:
                return
            store = socket.socket(socket.AF_UNIX)
            with self._lock:
                try:
                    if not self._whole:
                        raise ConnectionRefusedError
                    store.connect(self._store)
                except OSError:
                    engine.close()
                    store.close()
                    continue
                self._wires += [engine, store]
            for source, sink in ((engine, store), (store, engine)):
                threading.Thread(target=_carry, args=(source, sink), name="proxy-wire", daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
