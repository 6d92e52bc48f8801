"""What `serve` shows beside its log lines: a banner, and on a terminal the progress of the prefault."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvsieve_store import __version__
from kvsieve_store.arena.capacity import not_in_memory
from kvsieve_store.cli.output import stderr
from kvsieve_store.server.store import Store
from kvsieve_store.sizes import size

_log = logging.getLogger(__name__)

_REFRESH_SECONDS = 0.1
_LOG_SECONDS = 5.0


def transfer_config(endpoint: str) -> str:
    """The value of vLLM's --kv-transfer-config that points an engine at a store, JSON."""
    return json.dumps(
        {
            "kv_connector": "KVSieveConnector",
            "kv_connector_module_path": "kvsieve_connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvsieve.endpoint": endpoint},
        },
        separators=(",", ":"),
    )


async def show(store: Store) -> None:
    """Runs beside a store that has started. Prints nothing but log lines when those are JSON."""
    console = stderr()
    complaint = "" if store.settings.hugepages else not_in_memory(store.settings.shm_dir)
    if complaint:
        _log.warning("%s", complaint)
    if store.settings.log_format == "text":
        print_banner(console, store)
    if console.is_terminal and store.settings.log_format == "text":
        await _show_bar(console, store)
    else:
        await _log_progress(store)


def print_banner(console: Console, store: Store) -> None:
    """Addresses, sizes, and how an engine is pointed at the store."""
    settings = store.settings
    http = f"http://{store.http_address.host_port}" if store.http_address else "off"
    lines = [
        f"endpoint  {', '.join(store.endpoints)}",
        f"pool size {size(settings.pool_size)} in {settings.hugepages or settings.shm_dir}",
        f"http      {http}",
    ]
    title = f"kvsieve {__version__}"
    if console.is_terminal:
        console.print(Panel(Text("\n".join(lines)), title=title, expand=False))
    else:
        console.print(Text("\n".join([title, *(f"  {line}" for line in lines)])))
    # Outside the panel and unwrapped, so that it can be copied.
    console.print(Text("Point an engine at it (vllm serve MODEL ...):"))
    console.print(Text(f"  --kv-transfer-config '{transfer_config(store.endpoints[0])}'", style="bold"))


@contextmanager
def logs_above(progress: Progress) -> Iterator[Progress]:
    """Shows the bar; log lines go through its console meanwhile, which keeps them off the bar's line."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    with progress:
        # While it is shown, rich has put its own stream in the place of sys.stderr.
        before = [(handler, handler.setStream(sys.stderr)) for handler in handlers]
        try:
            yield progress
        finally:
            for handler, stream in before:
                if stream is not None:
                    handler.setStream(stream)


async def _show_bar(console: Console, store: Store) -> None:
    columns = (TextColumn("prefaulting"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    with logs_above(bar) as progress:
        task = progress.add_task("", total=1.0)
        while store.core.phase == "prefaulting":
            progress.update(task, completed=store.core.prefaulted)
            await asyncio.sleep(_REFRESH_SECONDS)


async def _log_progress(store: Store) -> None:
    await asyncio.sleep(_LOG_SECONDS)
    while store.core.phase == "prefaulting":
        _log.info("prefaulting: %.0f%% done", store.core.prefaulted * 100)
        await asyncio.sleep(_LOG_SECONDS)
