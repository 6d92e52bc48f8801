"""Two hosts on one machine: two network namespaces, a link between them, and one from the tests to each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A namespace. peer: its address on the link to the other host. here: its address for the tests."""

    netns: str
    peer: str
    here: str

    @property
    def path(self) -> str:
        return f"/run/netns/{self.netns}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs on this host."""
        return ("ip", "netns", "exec", self.netns)


class Net:
    """Hosts `a` and `b`, and their link, which can be cut and made slow."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a = a
        self.b = b

    def cut(self) -> None:
        """No packet gets through any more; connections stay, as with a pulled plug."""
        _run(*self.a.prefix, "ip", "link", "set", "peer", "down")

    def mend(self) -> None:
        """As it was at first."""
        _run(*self.a.prefix, "ip", "link", "set", "peer", "up")
        for host in (self.a, self.b):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(*host.prefix, "tc", "qdisc", "del", "dev", "peer", "root")

    def slow(self, mbit: int) -> None:
        """A narrow link, both ways, with a queue that holds at most 50 ms: more than that is dropped."""
        for host in (self.a, self.b):
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", "16k", "latency", "50ms")
            _run(*host.prefix, "tc", "qdisc", "replace", "dev", "peer", "root", *shape)

    def bad(self) -> None:
        """20 ms of delay and 2 % loss each way. Raises CalledProcessError where the kernel has no netem."""
        for host in (self.a, self.b):
            shape = ("netem", "delay", "20ms", "5ms", "loss", "2%")
            _run(*host.prefix, "tc", "qdisc", "replace", "dev", "peer", "root", *shape)


def why_not() -> str:
    """Why no namespaces can be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    probe = f"kv-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"
    try:
        _run("ip", "-n", probe, "link", "add", "x", "type", "veth", "peer", "name", "y")
    except subprocess.CalledProcessError as error:
        return f"veth pairs are not allowed: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", probe)
    return ""


@contextmanager
def two_hosts() -> Iterator[Net]:
    """Both hosts and their links; gone on the way out."""
    number = os.getpid() % 64
    hosts = [
        Host(f"kv-{name}-{os.getpid()}", f"10.77.{number}.{i}", f"10.78.{number * 2 + i - 1}.2")
        for i, name in ((1, "a"), (2, "b"))
    ]
    try:
        for host in hosts:
            here, outside = f"kv{host.netns[3]}{os.getpid()}", host.here.removesuffix("2") + "1/30"
            _run("ip", "netns", "add", host.netns)
            _run("ip", "-n", host.netns, "link", "set", "lo", "up")
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", "tests", "netns", host.netns)
            _run("ip", "addr", "add", outside, "dev", here)
            _run("ip", "link", "set", here, "up")
            _run("ip", "-n", host.netns, "addr", "add", f"{host.here}/30", "dev", "tests")
            _run("ip", "-n", host.netns, "link", "set", "tests", "up")
        a, b = hosts
        _run(
            "ip",
            "-n",
            a.netns,
            "link",
            "add",
            "peer",
            "type",
            "veth",
            "peer",
            "name",
            "peer",
            "netns",
            b.netns,
        )
        for host in hosts:
            _run("ip", "-n", host.netns, "addr", "add", f"{host.peer}/24", "dev", "peer")
            _run("ip", "-n", host.netns, "link", "set", "peer", "up")
        yield Net(a, b)
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", host.netns)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
