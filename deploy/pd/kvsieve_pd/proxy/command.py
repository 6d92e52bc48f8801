"""The command line: a flag and a variable per setting."""

from __future__ import annotations

import inspect
import logging
from dataclasses import Field, fields
from typing import Annotated, Any

import typer
from aiohttp import web

from kvsieve_pd.proxy.app import Proxy
from kvsieve_pd.proxy.settings import Address, ProxySettings

PREFIX = "KVSIEVE_PROXY_"

_HELP = {
    "prefill": "Prefill engine: URL, or URL=HOST:PORT with its store's address for peers. May be repeated.",
    "decode": "Decode engine: URL. May be repeated.",
    "listen": "Address to serve.",
    "flow": "Decode is asked after prefill (sequential) or at once (overlapped).",
    "wait_ms": "Overlapped: how long decode waits for the next block before it computes, milliseconds.",
    "short_prompt": "Prompts of fewer characters, or token ids, go to decode alone.",
    "max_body": "Most bytes of a request.",
    "max_requests": "Most requests at a time.",
    "attempts": "Engines of a kind that a request is tried on.",
    "connect_timeout": "Seconds to connect to an engine.",
    "prefill_timeout": "Seconds for prefill's answer.",
    "first_byte_timeout": "Seconds for decode's first byte, or its whole answer when it is not streamed.",
    "idle_timeout": "Seconds between two pieces of a stream, and for a client to take one.",
    "health_interval": "Seconds between two checks of an engine.",
    "health_timeout": "Seconds for the answer to a check.",
    "fails": "Failures in a row that take an engine out until a check succeeds.",
    "drain_timeout": "Seconds for requests under way when the proxy is told to end.",
}


def build() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(_command())
    return app


def main() -> None:
    build()()


def _command() -> Any:
    """A function with one parameter per setting, made from ProxySettings."""

    def proxy(**flags: Any) -> None:
        """Answer as OpenAI's API: one engine prefills, another decodes.

        A flag wins over its KVSIEVE_PROXY_* variable. Lists in variables have spaces between.
        """
        try:
            engines: dict[str, Any] = {
                name: tuple(map(Address.parse, flags.pop(name) or ())) for name in ("prefill", "decode")
            }
            settings = ProxySettings(**engines | flags)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        web.run_app(
            Proxy(settings).app,
            host=settings.host,
            port=settings.port,
            shutdown_timeout=settings.drain_timeout,
            handler_cancellation=True,
            access_log=None,
            print=lambda *_: logging.info("serving on http://%s:%d", settings.host, settings.port),
        )

    proxy.__signature__ = inspect.Signature([_parameter(f) for f in fields(ProxySettings) if f.init])  # type: ignore[attr-defined]
    return proxy


def _parameter(setting: Field[Any]) -> inspect.Parameter:
    name = setting.name
    variable = PREFIX + name.upper()
    kind: Any = list[str] if name in ("prefill", "decode") else type(setting.default)
    default = None if kind == list[str] else setting.default
    option = typer.Option("--" + name.replace("_", "-"), envvar=variable, help=_HELP[name])
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
