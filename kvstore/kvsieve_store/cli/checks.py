"""What `doctor` looks at. Each check says what it found and, when that is not well, what to do.

A check takes the environment as arguments, so that it can be tried on another.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvsieve.v1.admin_pb2 import StatusResponse
from kvsieve_store.addresses import UnixAddress, parse_address
from kvsieve_store.arena.capacity import check_hugetlbfs, check_tmpfs, huge_page_bytes, not_in_memory
from kvsieve_store.arena.directory import find_dead, held_bytes
from kvsieve_store.client.admin import AdminClient
from kvsieve_store.errors import CapacityError, KVSieveError
from kvsieve_store.settings import StoreSettings
from kvsieve_store.sizes import size

VLLM_MIN, VLLM_BELOW = (0, 32), (0, 34)
"""Supported versions of vLLM: from the first, below the second."""

SPARSE_VLLM_MIN = (0, 33)
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
SPARSE_UNSET = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_KV_CACHE_LAYOUT": "BLHNC"}
"""Variables that stand in sparse mode's way, unless they have this value."""

_ADDRESS = "give the store's address: --endpoint unix:///path or host:port"

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "kvsieve"

Version = Callable[[str], str]
"""Installed version of a distribution; raises PackageNotFoundError. As importlib.metadata.version."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report. advice: empty when there is nothing to do."""

    check: str
    level: Level
    found: str
    advice: str = ""


def store(endpoint: str) -> tuple[Finding, StatusResponse | None]:
    """Whether a store answers there, and if not, why; and its answer."""
    if (wrong := _socket(endpoint)) is not None:
        return wrong, None
    try:
        with AdminClient(endpoint) as client:
            status = client.status()
    except KVSieveError as error:
        return Finding("store", Level.FAIL, str(error), _start(endpoint)), None
    found = f"{status.state}, version {status.version}, {size(status.arena_bytes)} arena at {endpoint}"
    return Finding("store", Level.OK if status.state == "ready" else Level.WARN, found), status


def _start(endpoint: str) -> str:
    return f"start one: kvsieve serve --listen {endpoint}"


def _socket(endpoint: str) -> Finding | None:
    """What is wrong with an address, as far as it shows without a call."""
    try:
        address = parse_address(endpoint)
    except ValueError as error:
        return Finding("store", Level.FAIL, str(error), _ADDRESS)
    if isinstance(address, UnixAddress):
        try:
            mode = address.path.stat().st_mode
        except FileNotFoundError:
            return Finding(
                "store", Level.WARN, f"no socket at {address.path}: no store runs there", _start(endpoint)
            )
        except OSError as error:
            return Finding("store", Level.FAIL, f"{address.path}: {error.strerror}", _rights(address.path))
        if not stat.S_ISSOCK(mode):
            return Finding("store", Level.FAIL, f"{address.path} is not a socket", _ADDRESS)
        if not os.access(address.path, os.R_OK | os.W_OK):
            return Finding("store", Level.FAIL, f"no right to use {address.path}", _rights(address.path))
    return None


def _rights(path: Path) -> str:
    return f"run as the user who runs the store (see ls -l {path.parent}); what it makes is its alone"


def memory(settings: StoreSettings, running: StatusResponse | None = None) -> Finding:
    """Room for the arena: the mount, the host's memory, and the memory limits of the cgroups.

    running: of a store that has its arena already; then whether an engine could map it from here.
    """
    if running is not None:
        return _mappable(Path(running.arena_dir), size(running.arena_bytes))
    needed = settings.pool_size
    try:
        if settings.hugepages is not None:
            check_hugetlbfs(settings.hugepages, needed, huge_page_bytes(settings.hugepages))
        else:
            check_tmpfs(settings.shm_dir, needed)
    except CapacityError as error:
        found, _, advice = str(error).partition("; ")
        return Finding("memory", Level.FAIL, found, advice)
    except OSError as error:
        return Finding("memory", Level.FAIL, f"{error.filename}: {error.strerror}", "give another --shm-dir")
    complaint = "" if settings.hugepages else not_in_memory(settings.shm_dir)
    if complaint:
        found, _, advice = complaint.rpartition("; ")
        return Finding("memory", Level.WARN, found, f"{advice}: --shm-dir /dev/shm")
    where = settings.hugepages or settings.shm_dir
    return Finding("memory", Level.OK, f"an arena of {size(needed)} fits {where}, the host and its cgroups")


def _mappable(arena: Path, arena_size: str) -> Finding:
    """Whether this container sees the memory of a running store."""
    if not arena.exists():
        return Finding(
            "memory",
            Level.FAIL,
            f"the store's arena of {arena_size}, {arena}, is not to be seen from here",
            f"engine and store need the same memory at {arena.parent}: docker run --ipc=container:STORE or "
            "--ipc=host, in Kubernetes one volume of medium: Memory",
        )
    if not os.access(arena, os.R_OK | os.W_OK | os.X_OK):
        return Finding("memory", Level.FAIL, f"no right to use {arena}", _rights(arena))
    return Finding("memory", Level.OK, f"the store has its {arena_size} in {arena}")


def arenas(mount: Path) -> Finding:
    """Memory that stores left behind when they were killed."""
    dead = find_dead(mount)
    if not dead:
        return Finding("arenas", Level.OK, f"none of a dead store in {mount}")
    return Finding(
        "arenas",
        Level.WARN,
        f"{len(dead)} of dead stores in {mount}, {size(sum(map(held_bytes, dead)))}",
        f"rm -r {shlex.join(map(str, dead))}; or start a store with the same --listen, which removes its own",
    )


def memlock(needed: int, limit: int | None = None, dev: Path = Path("/dev")) -> Finding:
    """RLIMIT_MEMLOCK against the arena, which GPU workers pin and RDMA registers in full.

    NVIDIA's driver does not count what it pins (tried: 580, 1 GiB under a limit of 64 KiB); RDMA's do.
    dev: where a GPU or RDMA shows.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", Level.OK, "unlimited")
    if limit >= needed or not any((dev / name).exists() for name in ("nvidiactl", "infiniband")):
        return Finding("memlock", Level.OK, size(limit))
    return Finding(
        "memlock",
        Level.WARN,
        f"{size(limit)}, less than the arena's {size(needed)}: RDMA can't register it, a GPU driver perhaps",
        "ulimit -l unlimited; container: docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
    )


def hugepages(wanted: Path | None, sys: Path = Path("/sys")) -> Finding:
    """Huge pages that are reserved. The arena uses them only when --hugepages names a mount."""
    found = []
    for folder in sorted((sys / "kernel/mm/hugepages").glob("hugepages-*kB")):
        total, free = ((folder / name).read_text().strip() for name in ("nr_hugepages", "free_hugepages"))
        if int(total):
            found.append(f"{total} of {folder.name.removeprefix('hugepages-')}, {free} free")
    if found or wanted is None:
        return Finding("hugepages", Level.OK, "; ".join(found) or "none reserved, and none asked for")
    return Finding(
        "hugepages", Level.FAIL, f"none reserved, and --hugepages {wanted} needs them", "set vm.nr_hugepages"
    )


def numa(node: int | None, sys: Path = Path("/sys")) -> Finding:
    """NUMA nodes, and whether the arena is bound to one."""
    nodes = sorted(int(f.name[4:]) for f in (sys / "devices/system/node").glob("node[0-9]*"))
    if node is not None and node not in nodes:
        listed = ", ".join(map(str, nodes)) or "none"
        return Finding("numa", Level.FAIL, f"no node {node}; there are: {listed}", "give another --numa-node")
    if node is not None:
        return Finding("numa", Level.OK, f"arena bound to node {node} of {len(nodes)}")
    if len(nodes) > 1:
        advice = "bind the arena to the GPU's node (nvidia-smi topo -m): kvsieve serve --numa-node N"
        return Finding("numa", Level.WARN, f"{len(nodes)} nodes, and the arena may lie on any", advice)
    return Finding("numa", Level.OK, "one node")


def vllm(version: Version = importlib.metadata.version) -> Finding:
    """Installed version of vLLM, by its metadata: it is not imported."""
    supported = f">={_dotted(VLLM_MIN)},<{_dotted(VLLM_BELOW)}"
    try:
        installed = version("vllm")
    except importlib.metadata.PackageNotFoundError:
        advice = "fine for a host that only runs the store; else run doctor in the engine's environment"
        return Finding("vllm", Level.WARN, "not installed in this environment", advice)
    numbers = tuple(int(n) for n in installed.split("+")[0].split(".")[:2] if n.isdigit())
    if VLLM_MIN <= numbers < VLLM_BELOW:
        return Finding("vllm", Level.OK, installed)
    return Finding(
        "vllm", Level.FAIL, f"{installed}; {supported} supported", f"pip install 'vllm{supported}'"
    )


def sparse(environ: Mapping[str, str], version: Version = importlib.metadata.version) -> Finding:
    """What sparse mode needs of the engine's environment: a hint, because other modes need none of it."""
    wanted = []
    try:
        numbers = tuple(int(n) for n in version("vllm").split("+")[0].split(".")[:2] if n.isdigit())
    except importlib.metadata.PackageNotFoundError:
        return Finding("sparse", Level.OK, "not looked at: no vLLM here")
    if numbers < SPARSE_VLLM_MIN:
        wanted.append(f"vllm>={_dotted(SPARSE_VLLM_MIN)} with CUDA")
    if not any(_installed(name, version) for name in CUPY):
        wanted.append(f"CuPy (pip install {CUPY[0]})")
    for name, value in SPARSE_UNSET.items():
        if environ.get(name, value) != value:
            wanted.append(f"{name} unset instead of {environ[name]}")
    if wanted:
        return Finding("sparse", Level.OK, "no sparse mode here: it needs " + ", ".join(wanted))
    return Finding("sparse", Level.OK, "vLLM and CuPy are there")


def _installed(name: str, version: Version) -> bool:
    try:
        version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def plugin(environ: Mapping[str, str], names: Iterable[str] | None = None) -> Finding:
    """The entry point through which vLLM loads the connector. names: plugins that are installed."""
    if names is None:
        names = [entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)]
    if PLUGIN not in names:
        return Finding("plugin", Level.FAIL, f"{PLUGIN} is not among {PLUGIN_GROUP}", "install kvsieve anew")
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        advice = f"add {PLUGIN} to VLLM_PLUGINS, or unset it"
        return Finding("plugin", Level.FAIL, f"VLLM_PLUGINS={allowed!r} leaves {PLUGIN} out", advice)
    return Finding("plugin", Level.OK, f"{PLUGIN} is in {PLUGIN_GROUP}")


def hashes(environ: Mapping[str, str]) -> Finding:
    """PYTHONHASHSEED: it seeds vLLM's block hashes, so all engines of a pool must have the same."""
    seed = environ.get("PYTHONHASHSEED")
    if seed is None:
        found = "PYTHONHASHSEED not set: same keys in every engine with vLLM's default, sha256"
        return Finding("hashes", Level.OK, found)
    if seed == "random":
        advice = "unset it, or set the same number for every engine"
        return Finding("hashes", Level.WARN, "PYTHONHASHSEED=random", advice)
    found = f"PYTHONHASHSEED={seed}: engines share blocks only with others that have the same"
    return Finding("hashes", Level.OK, found)
