"""Two hosts with real engines, made once; each test finds them whole and leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsieve_pd.proxy.app import Proxy
from kvsieve_pd.proxy.settings import Address, Flow, ProxySettings
from tests.conftest import free_port
from tests.proxy.upstreams import ProxyPages, serving
from tests.two_hosts import net
from tests.two_hosts.cluster import Cluster, Engine, Preloaded, cluster


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


@pytest.fixture
def proxied(pd: Cluster) -> Iterator[Callable[..., ProxyPages]]:
    """proxied(flow) -> a proxy in front of both hosts, which knows the prefill host's store."""
    with contextlib.ExitStack() as stack:

        def start(flow: Flow) -> ProxyPages:
            prefill = Address(pd.prefill.engine.url, pd.prefill.address)
            settings = ProxySettings((prefill,), (Address(pd.decode.engine.url),), flow=flow, wait_ms=2_000)
            pages = ProxyPages()
            pages.url = f"http://127.0.0.1:{(port := free_port())}"
            stack.enter_context(serving(lambda: Proxy(settings).app, port))
            return pages

        yield start
