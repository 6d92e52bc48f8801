"""What every kind of test may use: free ports, store processes, and models that are made on demand."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.forked import Forked

ROOT = Path(__file__).parent.parent
MODEL_CACHE = Path(os.environ.get("KVSIEVE_TEST_MODELS") or ROOT / ".cache" / "models")

# For engines in this process and in children; vLLM reads them when it is imported. One process and one
# thread an engine: quicker with tiny models, and its objects can be looked at.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
with contextlib.suppress(ImportError):  # tests on GPUs do without
    from hypothesis import settings

    settings.register_profile("kvsieve", deadline=None)  # an example takes as long as the machine is busy
    settings.load_profile("kvsieve")
os.environ.pop("KVSIEVE_TEST_MODELS", None)  # the store refuses KVSIEVE_ variables that it does not know


ENGINES = [ROOT / "tests" / folder for folder in ("engine", "fault", "pd", "two_hosts")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines run one after the other: side by side they would starve on two cores."""
    for item in items:
        if any(folder in item.path.parents for folder in ENGINES):
            item.add_marker(pytest.mark.xdist_group("engines"))


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, and that the system gives to nobody who
    asks for any, as connections do all the time."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choose = random.SystemRandom()  # tests set the seed of the others
    while True:
        port = choose.randrange(10_000, given if given > 11_000 else 60_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class StoreProcess:
    """A `kvsieve serve` of its own, on a socket in a directory of its own.

    kill() is `kill -9`; start() after it is a store that comes back on the same socket.
    """

    def __init__(self, *flags: str, http: str | None = None, netns: str = "") -> None:
        """http: address of its HTTP port. netns: path of a network namespace to run in."""
        self.dir = Path(tempfile.mkdtemp(prefix="kvsieve-"))
        self.socket = self.dir / "s.sock"
        # Of its own, so that a killed store's arena goes too. Containers often have 64 MiB of /dev/shm.
        roomy = shutil.disk_usage("/dev/shm").free > 1 << 30
        self.shm = Path(tempfile.mkdtemp(prefix="kvsieve-test-", dir="/dev/shm" if roomy else self.dir))
        self.endpoint = f"unix://{self.socket}"
        self.http = http or f"127.0.0.1:{free_port()}"
        self.netns = netns
        self.log = self.dir / "store.log"
        self.flags = flags
        self.process: Forked | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout: float = 30.0) -> StoreProcess:
        """Returns once the store says that it is ready; raises RuntimeError with its log if it does not."""
        args = ["serve", "--listen", self.endpoint, "--http", self.http, *self._memory_flags(), *self.flags]
        if "--peer-allow" not in self.flags:
            args += ["--peer-allow", "*"]
        self.process = Forked(args, self.log, self.netns)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.ready():
                return self
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the store did not get ready in {timeout} s:\n{self.log.read_text()[-4000:]}")

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> str:
        """The text of /metrics. Asked again when the connection is reset; a store that is gone refuses it."""
        for _ in range(3):
            with contextlib.suppress(ConnectionResetError):
                return self._metrics()
        return self._metrics()

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as answer:
            return bytes(answer.read()).decode()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        return self._end(signal.SIGTERM)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.terminate()
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _memory_flags(self) -> list[str]:
        flags = [] if "--pool-size" in self.flags else ["--pool-size", "256MiB"]
        return flags if "--shm-dir" in self.flags else [*flags, "--shm-dir", str(self.shm)]


@pytest.fixture
def unused_port() -> int:
    return free_port()


@pytest.fixture
def start_store() -> Iterator[Callable[..., StoreProcess]]:
    """start_store("--pool-size", "64MiB", ...) -> a ready StoreProcess; all are ended after the test."""
    stores: list[StoreProcess] = []

    def start(*flags: str) -> StoreProcess:
        stores.append(StoreProcess(*flags))
        return stores[-1].start()

    yield start
    for store in stores:
        store.close()


@pytest.fixture
def store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    """A ready store of 256 MiB, for this test alone."""
    return start_store()


def model(name: str) -> Path:
    """Folder of one of deploy/cpu/make_models.py's models; a process of its own makes it the first time."""
    MODEL_CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(MODEL_CACHE / f"{name}.lock"):
        return _made(name)


def _made(name: str) -> Path:
    command = [sys.executable, str(ROOT / "deploy/cpu/make_models.py"), str(MODEL_CACHE), name]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.fail(f"make_models.py {name} failed:\n{made.stderr[-4000:]}", pytrace=False)
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """GQA, bfloat16, random weights."""
    return model("tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    """Sliding windows of 128 tokens and full attention in turns: three KV groups; float32, random weights."""
    return model("tiny-gemma3")


@pytest.fixture(scope="session")
def tiny_dsv3() -> Path:
    """MLA, float32, random weights; run it with engine/conftest.py's ENGINE_ARGS."""
    return model("tiny-dsv3")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, bfloat16, real weights."""
    return model("smollm2")
