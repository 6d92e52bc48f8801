"""Commands that look and change nothing: status, pools, sessions, blocks."""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated

import typer

from kvsieve.v1.admin_pb2 import StatusResponse
from kvsieve_store.cli.endpoint import EndpointOption, admin
from kvsieve_store.cli.keys import PAGE, PoolArgument, every_block
from kvsieve_store.cli.output import (
    Column,
    Format,
    FormatOption,
    duration,
    print_record,
    print_rows,
)
from kvsieve_store.sizes import size

KEY_DIGITS = 16
"""Hex digits of a key that the table shows; JSON has all."""

_UUID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)


def short_name(name: str) -> str:
    """A pool's name for a table: of a path only the last part. JSON has all of it."""
    return ".../" + name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "./", "../", "~")) else name


def short_engine(name: str) -> str:
    """An engine's id for a table: of a UUID only the first eight digits. JSON has all of it."""
    return _UUID.sub(r"\1", name)


_POOL_COLUMNS = (
    Column("NAME", lambda p: short_name(p.name)),
    Column("POOL ID", lambda p: p.pool_id[:12]),
    Column("DTYPE", lambda p: p.dtype),
    Column("TOKENS", lambda p: str(p.block_tokens), right=True),
    Column("SLOT", lambda p: size(p.slot_bytes), right=True),
    Column("OWNED", lambda p: size(p.owned_bytes), right=True),
    Column("QUOTA", lambda p: size(p.quota_bytes), right=True),
    Column("SEALED", lambda p: str(p.sealed_blocks), right=True),
    Column("LEASED", lambda p: str(p.leased_blocks), right=True),
    Column("PINNED", lambda p: str(p.pinned_blocks), right=True),
    Column("WRITING", lambda p: str(p.writing_slots), right=True),
    Column("FREE", lambda p: str(p.free_slots), right=True),
    Column("SESSIONS", lambda p: str(p.sessions), right=True),
    Column("MATCHED", lambda p: str(p.matched_blocks), right=True),
    Column("EVICTED", lambda p: str(p.evicted_blocks), right=True),
)

_SESSION_COLUMNS = (
    Column("SESSION", lambda s: s.session),
    Column("ENGINE", lambda s: short_engine(s.engine_id)),
    Column("CLIENT", lambda s: s.client),
    Column("PID", lambda s: str(s.pid), right=True),
    Column("POOL", lambda s: short_name(s.pool)),
    Column("AGE", lambda s: duration(s.age_seconds), right=True),
    Column("IDLE", lambda s: duration(s.idle_seconds), right=True),
    Column("HELD", lambda s: str(s.held_slots), right=True),
    Column("LEASES", lambda s: str(s.leases), right=True),
    Column("STATE", lambda s: s.state),
)

_BLOCK_COLUMNS = (
    Column("KEY", lambda b: b.key.hex()[:KEY_DIGITS]),
    Column("PARENT", lambda b: b.parent.hex()[:12] or "-"),
    Column("SLOT", lambda b: str(b.slot), right=True),
    Column("GEN", lambda b: str(b.generation), right=True),
    Column("LEASES", lambda b: str(b.leases), right=True),
    Column("CHILDREN", lambda b: str(b.children), right=True),
    Column("PINNED", lambda b: "yes" if b.pinned else "-"),
    Column("VISITED", lambda b: "yes" if b.visited else "-"),
)


def status(
    context: typer.Context, endpoint: EndpointOption = None, form: FormatOption = Format.TABLE
) -> None:
    """Show one page about the store."""
    with admin(context, endpoint) as client:
        s = client.status()
    arena = max(s.arena_bytes, 1)
    lines = [
        ("state", s.state if s.state != "prefaulting" else f"prefaulting, {s.prefaulted:.0%} done"),
        ("version", s.version),
        ("instance", s.instance.hex()),
        ("up", duration(s.uptime_seconds)),
        ("listens on", ", ".join(s.listen)),
        ("arena", f"{size(s.arena_bytes)} in {s.arena_dir}"),
        ("owned by pools", f"{size(s.owned_bytes)} ({s.owned_bytes / arena:.1%})"),
        ("in sealed blocks", f"{size(s.sealed_bytes)} ({s.sealed_bytes / arena:.1%})"),
        ("sealed blocks", str(s.sealed_blocks)),
        ("pools", str(s.pools)),
        ("sessions", str(s.sessions)),
        ("leases", str(s.leases)),
        ("other memory", size(s.rss_bytes)),
        ("directory", _directory(s)),
    ]
    print_record(form, s, lines)


def _directory(s: StatusResponse) -> str:
    """Where it is, and how this store stands with it."""
    if s.directory in ("", "local"):
        return "local"
    parts = [s.directory]
    parts.append(f"down: {s.directory_down}" if s.directory_down else "up")
    if s.directory_address:
        parts.append(f"announces {s.directory_address}, {s.directory_queued} keys queued")
    return "; ".join(parts)


def pools(context: typer.Context, endpoint: EndpointOption = None, form: FormatOption = Format.TABLE) -> None:
    """List the pools: one a model, as engines with the same settings share it."""
    with admin(context, endpoint) as client:
        rows = client.list_pools().pools
    print_rows(form, rows, _POOL_COLUMNS, none="No pools: no engine is attached, and none has left blocks.")


def sessions(
    context: typer.Context, endpoint: EndpointOption = None, form: FormatOption = Format.TABLE
) -> None:
    """List the engines that are attached, and ended sessions whose slots are not free yet."""
    with admin(context, endpoint) as client:
        rows = client.list_sessions().sessions
    print_rows(form, rows, _SESSION_COLUMNS, none="No sessions: no engine is attached.")


def blocks(
    context: typer.Context,
    pool: PoolArgument,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Most blocks to list; 0: all.")] = 100,
    endpoint: EndpointOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List sealed blocks of a pool, in no particular order."""
    with admin(context, endpoint) as client:
        rows = list(islice(every_block(client, pool, limit or PAGE), limit or None))
    print_rows(form, rows, _BLOCK_COLUMNS, none=f"No sealed blocks in {pool}.")
