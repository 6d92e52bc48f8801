"""Two hosts with real engines, made once; each test finds them whole and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pd import net
from tests.pd.cluster import Cluster, Engine, Preloaded, cluster


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Where engines come from."""
    process = Preloaded(tmp_path_factory.mktemp("pd"))
    process.wait()
    yield process
    process.close()


@pytest.fixture(scope="session")
def plain_engine(
    preloaded: Preloaded, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine of the same model, alone, without the connector."""
    engine = Engine(preloaded, tiny_qwen3, None, None, tmp_path_factory.mktemp("plain") / "engine.log")
    engine.start()
    engine.wait()
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[net.Net]:
    if reason := net.why_not():
        pytest.skip(reason)
    with net.two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="session")
def hosts(
    two_hosts: net.Net, preloaded: Preloaded, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(two_hosts, preloaded, tiny_qwen3, tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture
def pd(hosts: Cluster) -> Iterator[Cluster]:
    """The two hosts, whole. After the test they are made whole again, and hold nothing."""
    hosts.mend()
    yield hosts
    hosts.mend()
    hosts.nothing_leaks()
