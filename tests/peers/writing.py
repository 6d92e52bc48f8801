"""An engine that writes blocks layer by layer, as far as a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from kvsieve_store.client import ArenaMap, SealEntry, StoreClient
from tests.peers.conftest import BLOCK, LAYERS, SPEC, WAIT, content
from tests.protocol.client_stores import chain, entries

LAYER = BLOCK // LAYERS


class Writer:
    """Blocks with content(), announced at a client's store."""

    def __init__(self, client: StoreClient, count: int, start: int = 0, hold_seconds: float = 0.0) -> None:
        """start: number of the first block."""
        self.client, self.start = client, start
        attachment = client.wait_attached(WAIT)
        self.keys = chain(count, start)
        client.reserve(count)
        self.refs = client.take_credits(count)
        assert len(self.refs) == count
        self.arena = ArenaMap(attachment)
        client.announce(self.entries, hold_seconds=hold_seconds)

    @property
    def entries(self) -> list[SealEntry]:
        return entries(self.keys, self.refs)

    def write(self, layers: Sequence[int], wrong: int = 0) -> None:
        """wrong: added to every byte."""
        for layer in layers:
            part = slice(layer * LAYER, (layer + 1) * LAYER)
            for n, ref in enumerate(self.refs, self.start):
                self.arena.slot(ref.slot)[part] = content(n)[part] + wrong
                self.arena.set_layers_done(ref.slot, 0, layer + 1)

    def seal(self) -> None:
        self.client.seal(self.entries)

    def give_up(self) -> None:
        self.client.release(refs=self.refs)

    def close(self) -> None:
        """Lets go of the session's lock."""
        self.arena.close()


def write_and_wait(endpoint: str, count: int, layers: Sequence[int], pipe: Connection) -> None:
    """For a process of its own: announces and writes so far, says so, and waits to be killed."""
    with StoreClient(endpoint, SPEC, engine_id="writer", credit_target=0) as client:
        writer = Writer(client, count)
        writer.write(layers)
        pipe.send(b"written")
        pipe.recv()
