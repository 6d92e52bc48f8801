"""The command `serve`: one flag per field of StoreSettings, made from it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from kvsieve_store.settings import ENV_PREFIX, StoreSettings, load
from kvsieve_store.sizes import size

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=f"{ENV_PREFIX}CONFIG",
        metavar="FILE",
        help="YAML file of settings: the names of the flags, with _ for -.",
        show_default=False,
    ),
]


class PlainHelp(TyperCommand):
    """Help without panels: the columns of panels leave no room for text beside long flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"rich_markup_mode": None})


def command() -> Callable[..., None]:
    """The function behind `serve`, with the flags as its parameters."""

    def serve(config: Path | None, **flags: Any) -> None:
        """Run the store: serve engines on this host until SIGTERM, Ctrl-C or `kvsieve drain`.

        A flag wins over its KVSIEVE_* variable, and that over the --config file.
        """
        settings = load(flags, config, os.environ)
        from kvsieve_store.cli.terminal import show
        from kvsieve_store.server.process import run

        raise typer.Exit(run(settings, show))

    parameters = [_parameter("config", ConfigOption)]
    parameters += [_parameter(name, _option(name, f)) for name, f in StoreSettings.model_fields.items()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {p.name: p.annotation for p in parameters}
    return serve


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation
    )


def _option(name: str, field: FieldInfo) -> Any:
    """The flag of a setting. Values stay text: load() checks them, and knows what was given where."""
    flag = "--" + name.replace("_", "-")
    help_text = f"{field.description}{_default(field)}"
    if field.annotation is bool:
        flags = f"{flag}/--no-{flag[2:]}" if field.default else flag
        return Annotated[bool | None, typer.Option(flags, help=help_text, show_default=False)]
    kind: Any = str | None
    if get_origin(field.annotation) in (tuple, dict):
        kind, help_text = list[str] | None, f"{help_text} May be repeated."
    return Annotated[kind, typer.Option(flag, metavar=_metavar(field), help=help_text, show_default=False)]


def _metavar(field: FieldInfo) -> str:
    """What a flag takes, by the type of its setting."""
    if isinstance(field.json_schema_extra, dict) and "metavar" in field.json_schema_extra:
        return str(field.json_schema_extra["metavar"])
    origin, kinds = get_origin(field.annotation), get_args(field.annotation) or (field.annotation,)
    if origin is Literal:
        return "|".join(kinds)
    if origin is dict:
        return "NAME=SIZE"
    names = {ByteSize: "SIZE", Path: "DIR", int: "N", float: "NUMBER"}
    return next((name for kind, name in names.items() if kind in kinds), "ADDRESS")


def _default(field: FieldInfo) -> str:
    value = field.get_default()
    if field.default_factory is not None or value is None or value is False:
        return ""
    if value is True:
        return " Default: yes."
    return f" Default: {size(value) if isinstance(value, ByteSize) and value else value}."
