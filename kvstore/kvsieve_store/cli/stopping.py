"""The command that ends a store in good order: drain."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsieve_store.cli.endpoint import EndpointOption, admin
from kvsieve_store.cli.output import Format, FormatOption, print_record


def drain(
    context: typer.Context,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=600, metavar="SECONDS", help="How long to wait for leases.")
    ] = 30.0,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """End the store: nothing new from now on, wait for leases to come back, then stop.

    Engines go on without it. Fails when leases were still held at the end.
    """
    with admin(context, endpoint) as client:
        answer = client.drain(timeout_ms=max(round(timeout * 1000), 1))
    lines = [("leases left", str(answer.leases_left)), ("store", "has ended; engines go on without it")]
    print_record(form, answer, lines)
    if answer.leases_left:
        raise typer.Exit(1)
