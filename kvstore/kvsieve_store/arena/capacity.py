"""Does the arena fit? Asked before anything is created, since too little memory shows up later as SIGBUS."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsieve_store.errors import CapacityError
from kvsieve_store.sizes import size

_IN_MEMORY = ("tmpfs", "hugetlbfs", "ramfs")
_PROC = Path("/proc")
_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Bound:
    """Something that limits the arena: bytes that it has left, and what to do when they are too few."""

    what: str
    available: int
    remedy: str


def check_tmpfs(directory: Path, needed: int, *, proc: Path = _PROC, sys: Path = _SYS) -> None:
    """Raises CapacityError unless `needed` bytes fit the mount, the host's memory and the memory cgroup."""
    stat = os.statvfs(directory)
    bounds = [
        Bound(
            f"free on {directory}",
            stat.f_bavail * stat.f_frsize,
            f"make the mount larger (mount -o remount,size=... {directory}; in a container, docker run "
            "--shm-size=...), or lower --pool-size",
        ),
        Bound("available in the host's memory (MemAvailable)", _mem_available(proc), "lower --pool-size"),
        *_cgroup_bounds(proc, sys),
    ]
    _check(needed, bounds)


def check_hugetlbfs(directory: Path, needed: int, page_bytes: int, *, sys: Path = _SYS) -> None:
    """Raises CapacityError unless enough huge pages of the mount's size are free.

    Reserved pages are promised to others already. A mount without a size option reports no free space of its
    own, so the kernel's count is what says.
    """
    counts = sys / "kernel/mm/hugepages" / f"hugepages-{page_bytes // 1024}kB"
    free, reserved = _read_int(counts / "free_hugepages"), _read_int(counts / "resv_hugepages")
    available = ((free or 0) - (reserved or 0)) * page_bytes
    _check(
        needed,
        [
            Bound(
                f"in free huge pages of {page_bytes // 1024} KiB (mount {directory})",
                available,
                f"set {counts}/nr_hugepages to {-(-needed // page_bytes)} or more, or lower --pool-size",
            )
        ],
    )


def file_system(directory: Path, *, proc: Path = _PROC) -> str:
    """Type of the file system that a directory is on, as mount(8) has it: tmpfs, ext4. "" when not known."""
    target, found, kind = directory.resolve(), -1, ""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        # Blanks in a path are written as octal escapes.
        path = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4]))
        # A later mount on the same path hides the earlier one.
        if target.is_relative_to(path) and len(path.parts) >= found:
            found, kind = len(path.parts), rest.split()[0]
    return kind


def not_in_memory(directory: Path, *, proc: Path = _PROC) -> str:
    """What is wrong with an arena there: that it is on a disk, say. "" when nothing is."""
    kind = file_system(directory, proc=proc)
    if kind in ("", *_IN_MEMORY):
        return ""
    return f"arena on {kind}: {directory} is not memory, and every write goes to the file system; use a tmpfs"


def huge_page_bytes(directory: Path) -> int:
    """Page size of a hugetlbfs mount, bytes. Raises CapacityError when `directory` is not one."""
    block = os.statvfs(directory).f_bsize
    if block <= os.sysconf("SC_PAGE_SIZE"):
        raise CapacityError(
            f"hugepages: {directory} is not a hugetlbfs mount (its pages are {block} bytes); "
            f"mount one with: mount -t hugetlbfs none {directory}"
        )
    return block


def _check(needed: int, bounds: list[Bound]) -> None:
    for bound in bounds:
        if bound.available < needed:
            raise CapacityError(
                f"pool_size: {_size(needed, bound.available)} needed, "
                f"{_size(bound.available, needed)} {bound.what}; {bound.remedy}"
            )


def _size(count: int, other: int) -> str:
    """With the bytes, where the other size would read the same without."""
    text = size(count, decimals=2)
    return text if text != size(other, decimals=2) else f"{text} ({count} bytes)"


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CapacityError(f"{proc}/meminfo has no MemAvailable line; Linux 3.14 or later is required")


def _cgroup_bounds(proc: Path, sys: Path) -> Iterator[Bound]:
    """One bound per memory limit between this process's cgroup and the root; version 2, and version 1."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, usage_file = sys / "fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = (
                sys / "fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = root / path.lstrip("/")
        # Inside a container the path may be the host's, where only the root of the mount exists.
        for directory in (group, *group.parents) if group.is_dir() else (root,):
            limit, usage = _read_int(directory / limit_file), _read_int(directory / usage_file)
            if limit is not None and usage is not None:
                # Inactive page cache counts as usage and is given up when memory is short.
                reclaimable = _read_field(directory / "memory.stat", "inactive_file")
                yield Bound(
                    f"left of the memory limit of cgroup {directory}",
                    max(limit - usage + reclaimable, 0),
                    "raise it (a container's memory limit must cover the arena), or lower --pool-size",
                )
            if directory == root:
                break


def _read_int(path: Path) -> int | None:
    """The number in a file; None when there is none ("max"), or no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
