"""The store's side of an Attach stream."""

from __future__ import annotations

import asyncio

from kvsieve.v1 import store_pb2 as pb

from kvsieve_store.protocol.layout import ExtentLayout
from kvsieve_store.state import Grant


def credits_message(grant: Grant) -> pb.Credits:
    """A grant as it goes over the wire."""
    message = pb.Credits()
    message.slots.extend(grant.slots.tolist())
    message.generations.extend(grant.generations.tolist())
    return message


class SessionStream:
    """Messages to one engine, in order, until the session ends.

    layout: of the session's pool.
    name: for log lines.
    """

    def __init__(self, session_id: bytes, layout: ExtentLayout, name: str) -> None:
        self.session_id = session_id
        self.layout = layout
        self.name = name
        self._outbox: asyncio.Queue[pb.AttachResponse | Exception | None] = asyncio.Queue()

    @property
    def short_id(self) -> str:
        """What listings and logs show; the whole id is a secret."""
        return self.session_id[:4].hex()

    def send(self, message: pb.AttachResponse) -> None:
        self._outbox.put_nowait(message)

    def end(self, error: Exception | None) -> None:
        """Ends the stream after what was sent so far, with an error or without."""
        self._outbox.put_nowait(error)

    async def next(self) -> pb.AttachResponse | None:
        """The next message to send; None at the end. Raises the error that the stream ends with."""
        item = await self._outbox.get()
        if isinstance(item, Exception):
            raise item
        return item
