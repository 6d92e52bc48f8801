"""The checks before anything is created, against made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsieve_store.arena import capacity
from kvsieve_store.errors import CapacityError

GIB = 1 << 30


class Host:
    """A /proc and a /sys with 100 GiB available and no memory cgroup."""

    def __init__(self, root: Path) -> None:
        self.mount, self.proc, self.sys = root / "shm", root / "proc", root / "sys"
        self.mount.mkdir()
        self.write(self.proc / "meminfo", f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB\n")
        self.write(self.proc / "self/cgroup", "")

    def write(self, path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}")

    def limit(self, group: str, limit: str | int, usage: int, inactive_file: int = 0) -> None:
        self.write(self.sys / group / "memory.max", limit)
        self.write(self.sys / group / "memory.current", usage)
        self.write(self.sys / group / "memory.stat", f"anon 1\ninactive_file {inactive_file}\n")

    def check(self, needed: int) -> None:
        capacity.check_tmpfs(self.mount, needed, proc=self.proc, sys=self.sys)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    class Stat:
        f_bavail, f_frsize = 200 * GIB // 4096, 4096

    monkeypatch.setattr(capacity.os, "statvfs", lambda path: Stat)
    return Host(tmp_path)


def test_the_mount_is_too_small(host: Host) -> None:
    with pytest.raises(CapacityError, match=r"(?s)201 GiB needed, 200 GiB free on .*remount,size="):
        host.check(201 * GIB)


def test_sizes_that_read_the_same_are_told_apart(host: Host) -> None:
    with pytest.raises(
        CapacityError, match=rf"200 GiB \({200 * GIB + 1} bytes\) needed, 200 GiB \({200 * GIB} bytes\) free"
    ):
        host.check(200 * GIB + 1)


MOUNTS = (
    "1 0 0:1 / / rw - ext4 /dev/sda rw\n"
    "2 1 0:2 / {root}/shm rw,nosuid shared:5 - tmpfs tmpfs rw\n"
    "3 1 0:3 / {root}/two\\040words rw - hugetlbfs none rw\n"
)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("shm", "tmpfs"), ("shm/deeper", "tmpfs"), ("shmall", "ext4"), ("two words", "hugetlbfs")],
)
def test_the_file_system_of_a_directory(host: Host, tmp_path: Path, folder: str, kind: str) -> None:
    host.write(host.proc / "self/mountinfo", MOUNTS.format(root=tmp_path.resolve()))
    assert capacity.file_system(tmp_path / folder, proc=host.proc) == kind
    complaint = capacity.not_in_memory(tmp_path / folder, proc=host.proc)
    assert ("arena on ext4" in complaint) == (kind == "ext4")
    assert bool(complaint) == (kind == "ext4")


def test_a_file_system_that_is_not_known_is_no_complaint(host: Host, tmp_path: Path) -> None:
    assert capacity.not_in_memory(tmp_path, proc=host.proc) == ""


def test_the_host_has_too_little_memory(host: Host) -> None:
    host.check(100 * GIB)
    with pytest.raises(CapacityError, match="MemAvailable"):
        host.check(101 * GIB)


def test_a_limit_of_any_parent_cgroup_counts(host: Host) -> None:
    host.write(host.proc / "self/cgroup", "0::/pods/one\n")
    host.limit("fs/cgroup/pods/one", "max", 4 * GIB)
    host.limit("fs/cgroup/pods", 10 * GIB, 4 * GIB, inactive_file=1 * GIB)
    host.check(7 * GIB)
    with pytest.raises(CapacityError, match=r"7 GiB left of the memory limit of cgroup .*/pods; raise it"):
        host.check(8 * GIB)


def test_version_1_cgroups(host: Host) -> None:
    host.write(host.proc / "self/cgroup", "5:cpu:/\n4:memory:/a\n")
    host.write(host.sys / "fs/cgroup/memory/a/memory.limit_in_bytes", 2 * GIB)
    host.write(host.sys / "fs/cgroup/memory/a/memory.usage_in_bytes", GIB)
    host.check(GIB)
    with pytest.raises(CapacityError, match=r"left of the memory limit of cgroup .*/memory/a"):
        host.check(2 * GIB)


def test_a_container_that_sees_only_the_root_of_its_cgroup(host: Host) -> None:
    host.write(host.proc / "self/cgroup", "0::/kubepods/pod1/abc\n")
    host.limit("fs/cgroup", 2 * GIB, GIB)
    with pytest.raises(CapacityError, match="left of the memory limit"):
        host.check(2 * GIB)


def test_huge_pages(host: Host) -> None:
    pages = host.sys / "kernel/mm/hugepages/hugepages-2048kB"
    host.write(pages / "free_hugepages", 10)
    host.write(pages / "resv_hugepages", 2)
    capacity.check_hugetlbfs(host.mount, 8 * (2 << 20), 2 << 20, sys=host.sys)
    with pytest.raises(CapacityError, match=r"nr_hugepages to 9 or more"):
        capacity.check_hugetlbfs(host.mount, 9 * (2 << 20), 2 << 20, sys=host.sys)
