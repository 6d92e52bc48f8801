"""Settings of the store process. A later source wins: defaults, YAML file, KVSIEVE_* variables, flags."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kvsieve_store.address_patterns import AddressPattern
from kvsieve_store.addresses import TcpAddress, UnixAddress, default_socket, parse_address
from kvsieve_store.errors import SettingsError
from kvsieve_store.protocol.layout import SLOT_ALIGN
from kvsieve_store.protocol.limits import MAX_SESSIONS
from kvsieve_store.sizes import exact_size

ENV_PREFIX = "KVSIEVE_"

MAX_SESSION_TIMEOUT = 30.0
"""Seconds. Clients' leases (60 s) outlast a session that is silent: an engine that was paused reads blocks
that are still there, or has lost its session and knows it."""

A_SIZE = "a size is expected, like 8GiB or 512MiB"
NAME_SIZE = "NAME=SIZE is expected, like Qwen3-0.6B=8GiB"

TRANSPORTS = ("shm", "ucx", "tcp")

DIRECTORY_URL = r"rediss?(\+cluster)?://\S+"

_OTHER_VARIABLES = re.compile(
    # Read by the CLI itself, and by the proxy.
    r"KVSIEVE_(CONFIG|ENDPOINT|PROXY_\w+)"
    # Kubernetes sets these in every pod of a namespace that has a Service named kvsieve*.
    r"|KVSIEVE_(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|KVSIEVE_(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)


def _default_listen() -> tuple[str, ...]:
    return (f"unix://{default_socket()}",)


def _size(value: object) -> object:
    """Lets 10Gi and 8G, as Kubernetes writes them, through to ByteSize."""
    return f"{value}B" if isinstance(value, str) and re.fullmatch(r"[\d.\s]+[kKmMgGtTpP]i?", value) else value


def _listen(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _patterns(value: object) -> object:
    """Each item of a list may itself have commas."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    return _listen(value)


def _quotas(value: object) -> object:
    """A mapping, or NAME=SIZE pairs: a list of them, or one text with commas (or JSON) between."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError(f"{value}: NAME=SIZE expected") from None
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        pairs = [str(item).rpartition("=") for item in value]
        for item, (name, _, size) in zip(value, pairs, strict=True):
            if not name.strip() or not size.strip():
                raise ValueError(f"{item}: NAME=SIZE expected")
        return {name.strip(): size.strip() for name, _, size in pairs}
    return value


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _parse(name: str, text: str) -> UnixAddress | TcpAddress:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


Size = Annotated[ByteSize, BeforeValidator(_size)]


class StoreSettings(BaseModel):
    """What a store process is started with. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    pool_size: Size = Field(ByteSize(8 << 30), description="Size of the arena, all pools together.")
    listen: Annotated[tuple[str, ...], BeforeValidator(_listen)] = Field(
        default_factory=_default_listen,
        description="Addresses to serve: unix:///path or host:port; the first names the store.",
        min_length=1,
    )
    allow_insecure_tcp: bool = Field(
        False, description="Allow TCP addresses beyond loopback, without encryption or authentication."
    )
    peer_listen: str = Field(
        "", description="Address where other stores read blocks from this one, host:port; empty: nowhere."
    )
    peer_advertise: str = Field(
        "",
        description="Control address that other stores are told for this one, host:port; empty: the first of "
        "listen that is TCP, else the first.",
    )
    peer_allow: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = Field(
        (),
        description="Stores that a request may name to pull from: host:port, IP addresses, networks, names, "
        "unix:///path, or * for every one; empty: none.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    peer_transports: str = Field(
        "shm,ucx,tcp",
        description="Ways to reach other stores, best first.",
        json_schema_extra={"metavar": "LIST"},
    )
    ucx_tls: str = Field(
        "^sm",
        description="Transports that UCX may use, as UCX_TLS.",
        min_length=1,
        json_schema_extra={"metavar": "LIST"},
    )
    directory: str = Field(
        "local",
        description="Where stores tell each other of their blocks: local (they don't), redis://host:port/db, "
        "rediss://..., redis+cluster://... or rediss+cluster://...",
        json_schema_extra={"metavar": "URL"},
    )
    directory_ttl: int = Field(
        3600, description="Seconds that the directory knows a block after it was last told of it.", ge=3
    )
    http: str = Field(
        "127.0.0.1:9317", description="Address of /healthz, /readyz, /metrics, /status; empty: off."
    )
    shm_dir: Path = Field(Path("/dev/shm"), description="tmpfs mount that holds the arena.")
    hugepages: Annotated[Path | None, BeforeValidator(_none_if_empty)] = Field(
        None, description="hugetlbfs mount that holds the arena instead."
    )
    segment_size: Size = Field(ByteSize(1 << 30), description="Size of one of the arena's files.")
    extent_size: Size = Field(ByteSize(64 << 20), description="Unit in which pools own memory.")
    numa_node: Annotated[int | None, BeforeValidator(_none_if_empty)] = Field(
        None, description="NUMA node that the arena's memory comes from.", ge=0
    )
    prefault: bool = Field(True, description="Touch all memory of the arena before serving, else reserve it.")
    pool_quota: Size = Field(ByteSize(0), description="Most that one pool may own; 0: the whole arena.")
    quotas: Annotated[dict[str, Size], BeforeValidator(_quotas)] = Field(
        default_factory=dict, description="Quota of single pools, NAME=SIZE, instead of pool_quota."
    )
    free_low: float = Field(
        0.02, description="Share of free slots below which a pool that can't grow evicts ahead.", ge=0, le=1
    )
    free_high: float = Field(0.05, description="Share of free slots up to which it evicts ahead.", ge=0, le=1)
    session_timeout: float = Field(
        10.0, description="Seconds of silence that end a session.", ge=0.1, le=MAX_SESSION_TIMEOUT
    )
    max_sessions: int = Field(MAX_SESSIONS, description="Most sessions at a time.", ge=1, le=MAX_SESSIONS)
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line."
    )
    log_format: Literal["text", "json"] = Field("text", description="Form of the log lines.")

    @model_validator(mode="after")
    def _check(self) -> StoreSettings:
        if self.extent_size == 0 or self.extent_size % SLOT_ALIGN:
            raise ValueError(
                f"extent_size: {exact_size(self.extent_size)} given, "
                f"a multiple of {exact_size(SLOT_ALIGN)} required"
            )
        if self.segment_size == 0 or self.segment_size % self.extent_size:
            raise ValueError(
                f"segment_size: {exact_size(self.segment_size)} given, "
                f"a multiple of extent_size ({exact_size(self.extent_size)}) required"
            )
        if self.pool_size < self.extent_size:
            raise ValueError(
                f"pool_size: {exact_size(self.pool_size)} given, "
                f"at least one extent ({exact_size(self.extent_size)}) required"
            )
        for name, quota in [
            ("pool_quota", self.pool_quota),
            *((f"quotas[{k}]", v) for k, v in self.quotas.items()),
        ]:
            if 0 < quota < self.extent_size or (quota == 0 and name != "pool_quota"):
                raise ValueError(
                    f"{name}: {exact_size(quota)} given, "
                    f"at least one extent ({exact_size(self.extent_size)}) required"
                )
        if self.free_low > self.free_high:
            raise ValueError(f"free_low: {self.free_low} given, at most free_high ({self.free_high}) allowed")
        for address in self.addresses:
            if isinstance(address, TcpAddress) and not address.is_loopback and not self.allow_insecure_tcp:
                raise ValueError(
                    f"listen: {address} is not a loopback address, and TCP here is neither encrypted nor "
                    "authenticated; to listen there all the same give --allow-insecure-tcp"
                )
        if not self.transports or not set(self.transports) <= set(TRANSPORTS):
            raise ValueError(
                f"peer_transports: {self.peer_transports!r} given, some of {','.join(TRANSPORTS)} required"
            )
        _ = self.peer_patterns
        peer = self.peer_address
        if peer is not None and not peer.is_loopback and not self.allow_insecure_tcp:
            raise ValueError(
                f"peer_listen: {peer.host_port} is not a loopback address, and blocks go there without "
                "encryption; to listen there all the same give --allow-insecure-tcp"
            )
        if self.directory != "local" and not re.fullmatch(DIRECTORY_URL, self.directory):
            raise ValueError(
                "directory: local, or a URL like redis://host:6379/0, rediss://host:6379/0 or "
                "redis+cluster://host:6379 required"
            )
        if self.peer_advertise and not isinstance(_parse("peer_advertise", self.peer_advertise), TcpAddress):
            raise ValueError(f"peer_advertise: {self.peer_advertise!r} given, host:port required")
        if self.directory != "local" and self.peer_listen and not self.peer_advertise:
            tcp = [address for address in self.addresses if isinstance(address, TcpAddress)]
            if not tcp or tcp[0].is_unspecified:
                raise ValueError(
                    "peer_advertise: not given, and the first TCP address of listen names no host; the "
                    "directory tells other stores where this one's blocks are: give host:port"
                )
        if self.http and not isinstance(_parse("http", self.http), TcpAddress):
            raise ValueError(f"http: {self.http!r} given, host:port required")
        return self

    @property
    def addresses(self) -> tuple[UnixAddress | TcpAddress, ...]:
        """`listen`, parsed."""
        return tuple(_parse("listen", text) for text in self.listen)

    @property
    def transports(self) -> tuple[str, ...]:
        """`peer_transports`, parsed."""
        return tuple(name.strip() for name in self.peer_transports.split(",") if name.strip())

    @property
    def peer_patterns(self) -> tuple[AddressPattern, ...]:
        """`peer_allow`, parsed."""
        try:
            return tuple(AddressPattern.parse(text) for text in self.peer_allow)
        except ValueError as error:
            raise ValueError(f"peer_allow: {error}") from None

    @property
    def peer_address(self) -> TcpAddress | None:
        """`peer_listen`, parsed; None when no peers are served."""
        if not self.peer_listen:
            return None
        address = _parse("peer_listen", self.peer_listen)
        if not isinstance(address, TcpAddress):
            raise ValueError(f"peer_listen: {self.peer_listen!r} given, host:port required")
        return address

    @property
    def http_address(self) -> TcpAddress | None:
        """`http`, parsed; None when HTTP is off."""
        address = parse_address(self.http) if self.http else None
        return address if isinstance(address, TcpAddress) else None

    @property
    def extents(self) -> int:
        """Extents of the arena; what pool_size has beyond whole extents is not used."""
        return self.pool_size // self.extent_size


def load(
    flags: Mapping[str, Any],
    config_file: Path | None,
    environ: Mapping[str, str],
    *,
    default_listen: str | None = None,
) -> StoreSettings:
    """Settings from all sources. Raises SettingsError, which names each bad key and where it was given.

    flags: setting name -> value; None means that the flag was not given.
    default_listen: takes the place of the default socket.
    """
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for source in (_from_file(config_file), _from_environ(environ), _from_flags(flags)):
        for name, (label, value) in source.items():
            values[name], given_as[name] = value, label
    if "listen" not in values:
        values["listen"] = (default_listen or f"unix://{default_socket(environ)}",)
    try:
        return StoreSettings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(e, given_as) for e in error.errors())) from None


def _from_file(path: Path | None) -> dict[str, tuple[str, Any]]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: a mapping of settings expected, {type(content).__name__} found")
    for key in content:
        _check_known(str(key), f"{key} in {path}", "")
    return {key: (f"{key} in {path}", value) for key, value in content.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in StoreSettings.model_fields and _OTHER_VARIABLES.fullmatch(variable):
            continue
        _check_known(name, variable, ENV_PREFIX)
        found[name] = (variable, value)
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for key, value in flags.items():
        name, label = key.replace("-", "_"), "--" + key.replace("_", "-")
        _check_known(name, label, "--")
        if value is not None:
            found[name] = (label, value)
    return found


def _check_known(name: str, label: str, style: str) -> None:
    if name in StoreSettings.model_fields:
        return
    (near,) = difflib.get_close_matches(
        name.lower().replace("-", "_"), StoreSettings.model_fields, n=1, cutoff=0.0
    )
    if style == "--":
        near = near.replace("_", "-")
    elif style == ENV_PREFIX:
        near = near.upper()
    raise SettingsError(f"{label}: no such setting; the nearest is {style}{near}")


_PLAIN = (
    (r"(Could not parse value and unit|could not interpret byte unit).*", A_SIZE),
    (r"Input should be a valid integer.*", "a whole number is expected"),
    (r"Input should be a valid number.*", "a number is expected"),
    (r"Input should be a valid boolean.*", "yes or no is expected"),
    (r"Input should be a valid (tuple|list).*", "a list is expected"),
    (r"Input should be a valid dictionary.*", NAME_SIZE),
    (r"Input should be a valid string.*", "text is expected"),
    (r"[Ii]nput is not a valid path.*", "a path is expected"),
    (r"Tuple should have at least 1 item.*", "at least one is required"),
    (r"Input should be greater than or equal to (.*)", r"at least \1 required"),
    (r"Input should be less than or equal to (.*)", r"at most \1 allowed"),
    (r"Input should be ('.*)", r"\1 expected"),
)
"""What pydantic and typer say, and what is said instead."""


def plain(message: str) -> str:
    """A complaint about a value in plain words."""
    message = message.removeprefix("Value error, ")
    for pattern, words in _PLAIN:
        message = re.sub(f"(?i:^{pattern}$)", words, message)
    return message


def _explain(error: ErrorDetails, given_as: Mapping[str, str]) -> str:
    message = plain(error["msg"])
    if not error["loc"]:
        field, _, rest = message.partition(":")
        return f"{given_as.get(field, field)}:{rest}"
    name, *inner = (str(part) for part in error["loc"])
    label = given_as.get(name, name) + "".join(f"[{part}]" for part in inner)
    given, wrong = error["input"], re.fullmatch(r"(?s)(.*): NAME=SIZE expected", message)
    if wrong:
        given, message = wrong[1], NAME_SIZE
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    return f"{label}: {given!r} given: {message}"
