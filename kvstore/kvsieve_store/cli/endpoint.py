"""--endpoint: which store a command talks to."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsieve_store.addresses import default_socket
from kvsieve_store.client.admin import AdminClient

VARIABLE = "KVSIEVE_ENDPOINT"

EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        envvar=VARIABLE,
        metavar="ADDRESS",
        help="Store to talk to: unix:///path or host:port. Default: the socket of a store on this host.",
        show_default=False,
    ),
]


def resolve(context: typer.Context, given: str | None) -> str:
    """The command's own --endpoint, else the one before the command, else the default socket.

    Raises SettingsError when there is no default.
    """
    return given or context.obj or f"unix://{default_socket()}"


def admin(context: typer.Context, given: str | None) -> AdminClient:
    """The operator's client for that store. Nothing is sent yet."""
    return AdminClient(resolve(context, given))
