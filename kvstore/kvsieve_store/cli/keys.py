"""How commands name pools and blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from kvsieve.v1 import admin_pb2 as pb
from kvsieve_store.client.admin import AdminClient
from kvsieve_store.errors import NotFoundError
from kvsieve_store.protocol.limits import KEY_BYTES

PAGE = 1000
"""Blocks asked for at a time; the protocol's largest page."""

_MIN_DIGITS, _DIGITS = 8, 2 * KEY_BYTES

PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", help="Name of the pool, or 8 or more hex digits of its id.")
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="HEX",
        help=f"Key of a block: {_DIGITS} hex digits, or the first {_MIN_DIGITS} or more. May be repeated.",
        show_default=False,
    ),
]


def check_keys(given: Sequence[str] | None) -> list[str]:
    """What --key was given, in lower case. Something that is no key or start of one is wrong usage."""
    for text in given or []:
        if not re.fullmatch(r"[0-9a-fA-F]*", text):
            raise typer.BadParameter(f"{text!r} has other than hex digits", param_hint="--key")
        if not _MIN_DIGITS <= len(text) <= _DIGITS:
            raise typer.BadParameter(
                f"{text!r} has {len(text)} digits, {_MIN_DIGITS} to {_DIGITS} required", param_hint="--key"
            )
    return [text.lower() for text in given or []]


def find_keys(client: AdminClient, pool: str, digits: Sequence[str]) -> list[bytes]:
    """Whole keys of the blocks that check_keys() let through. Whole ones are not looked up.

    Raises NotFoundError for digits that no block's key starts with, or those of several blocks.
    """
    fitting: dict[str, set[bytes]] = {text: set() for text in digits if len(text) < _DIGITS}
    if fitting:
        for block in every_block(client, pool):
            key = block.key.hex()
            for text, keys in fitting.items():
                if key.startswith(text):
                    keys.add(block.key)
    for text, keys in fitting.items():
        if not keys:
            raise NotFoundError(f"--key: no sealed block of {pool} has a key that starts with {text}")
        if len(keys) > 1:
            raise NotFoundError(f"--key: {text} fits {len(keys)} blocks of {pool}; give more digits")
    return [min(fitting[text]) if text in fitting else bytes.fromhex(text) for text in digits]


def every_block(client: AdminClient, pool: str, page_size: int = PAGE) -> Iterator[pb.BlockInfo]:
    """Sealed blocks of a pool, page by page as they are wanted."""
    token = ""
    while True:
        page = client.list_blocks(pool, page_size=min(page_size, PAGE), page_token=token)
        yield from page.blocks
        token = page.next_page_token
        if not token:
            return
