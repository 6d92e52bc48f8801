"""--endpoint: which store a command talks to."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsieve_store.addresses import default_socket
from kvsieve_store.client.admin import AdminClient
from kvsieve_store.errors import SettingsError

VARIABLE = "KVSIEVE_ENDPOINT"

NO_DEFAULT = (
    "endpoint: no default socket, since /run/kvsieve is not writable and XDG_RUNTIME_DIR is not set; "
    "give the store's address: --endpoint unix:///path/kvsieve.sock"
)

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
    if given or context.obj:
        return str(given or context.obj)
    try:
        return f"unix://{default_socket()}"
    except SettingsError:
        raise SettingsError(NO_DEFAULT) from None


def admin(context: typer.Context, given: str | None) -> AdminClient:
    """The operator's client for that store. Nothing is sent yet."""
    return AdminClient(resolve(context, given))
