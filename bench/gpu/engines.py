"""Engines to compare: each in a process of its own, alive side by side, measured in turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.gpu.steps import Step, noting_steps
from bench.output import OUT
from kvsieve_store.bench.saving import spawn

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("KVSIEVE_TEST_MODELS") or ROOT / ".cache/models")
START_SECONDS = 240.0
"""A first start compiles kernels."""

# One process an engine: its scheduler can be looked at.
_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def hisparse(host_pool_gib: int) -> dict[str, Any]:
    """kv_transfer_config of vLLM's own host tier."""
    return {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": host_pool_gib},
    }


def kvsieve(endpoint: str, **settings: Any) -> dict[str, Any]:
    """kv_transfer_config of this project's connector; settings: without "kvsieve."."""
    extra = {"endpoint": endpoint, "connect_timeout_ms": 20_000, **settings}
    return {
        "kv_connector": "KVSieveConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"kvsieve.{name}": value for name, value in extra.items()},
    }


@dataclass(frozen=True)
class EngineSpec:
    """arguments: of vllm.LLM. double_hash: HiSparse's hash table at twice the size that it is shipped with,
    which no setting of vLLM's does."""

    name: str
    arguments: dict[str, Any]
    double_hash: bool = False


@dataclass(frozen=True)
class Load:
    """requests at once, of random prompts of so many tokens, that get so many tokens each."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What a load took. seconds: from the first request to the last token. counters: of the connector."""

    seconds: float
    steps: list[Step]
    preemptions: int
    counters: dict[str, float] = field(default_factory=dict)


class EngineProcess:
    """Starts at once; a context manager that ends it. Its output goes to bench/out/gpu-engine-NAME.log."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        OUT.mkdir(parents=True, exist_ok=True)
        self.log = OUT / f"gpu-engine-{spec.name}.log"
        self._pipe, there = spawn.Pipe()
        environ = dict(os.environ)
        os.environ.update(_ENVIRON)
        try:
            self._process = spawn.Process(
                target=_serve,
                args=(asdict(spec), str(self.log), there),
                daemon=spec.arguments.get("tensor_parallel_size", 1) == 1,  # else it has children of its own
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(environ)
        there.close()

    def ready(self) -> dict[str, Any]:
        """Waits until it serves; returns what it says of itself. Raises RuntimeError with the log's end."""
        return dict(self._receive(START_SECONDS))

    def run(self, load: Load, limit: float) -> Run:
        """limit: seconds. Raises RuntimeError when it fails or takes longer."""
        self._pipe.send(asdict(load))
        answer = self._receive(limit)
        return Run(
            answer["seconds"], [Step(*s) for s in answer["steps"]], answer["preemptions"], answer["counters"]
        )

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20.0)
        self._process.kill()
        self._process.join()

    def _receive(self, limit: float) -> Any:
        what = f"{self.spec.name}: no answer in {limit:.0f} s"
        with contextlib.suppress(EOFError):
            if self._pipe.poll(limit):
                answer = self._pipe.recv()
                if "error" not in answer:
                    return answer
                what = f"{self.spec.name}: {answer['error']}"
        raise RuntimeError(f"{what}\n{self.log.read_text(errors='replace')[-1500:]}")


class Engines:
    """Engines by name, all ready. One that fails is left out, and why is in `failed`. A context manager."""

    def __init__(self, specs: list[EngineSpec]) -> None:
        """The first starts alone: it compiles what all of them need. The others start together."""
        self.failed: dict[str, str] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self._engines: dict[str, EngineProcess] = {}
        try:
            self._start(specs[:1])
            self._start(specs[1:])
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return [name for name in self._engines if name not in self.failed]

    def run(self, name: str, load: Load, limit: float = 180.0) -> Run | None:
        """None when the engine fails; it is left out from then on."""
        try:
            return self._engines[name].run(load, limit)
        except (RuntimeError, OSError) as error:
            self._fail(name, error)
            return None

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, specs: list[EngineSpec]) -> None:
        if not specs:
            return
        for spec in specs:
            self._engines[spec.name] = EngineProcess(spec)
        with ThreadPoolExecutor(len(specs)) as threads:
            waits = {spec.name: threads.submit(self._engines[spec.name].ready) for spec in specs}
        for name, wait in waits.items():
            try:
                self.about[name] = wait.result()
            except RuntimeError as error:
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed[name] = str(error)
        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
        self._engines[name].close()


def model(layers: int) -> Path:
    """Folder of a DeepSeek-V3.2 in small, made once, with random weights."""
    path = MODELS / f"dsa-{layers}"
    return path if (path / "config.json").exists() else make_model(path, layers)


def make_model(path: Path, layers: int, *, weights: bool = True) -> Path:
    """Writes one to `path`; returns that. Without weights there is only its configuration."""
    maker = [sys.executable, str(ROOT / "tests/gpu/make_dsa.py"), str(path), "--layers", str(layers)]
    subprocess.run(maker if weights else [*maker, "--no-weights"], check=True)
    return path


def common_arguments(path: Path, cache_bytes: int, max_model_len: int) -> dict[str, Any]:
    """What all engines of a comparison have: fp8_ds_mla, FLASHMLA_SPARSE, full and piecewise CUDA graphs."""
    return {
        "model": str(path),
        "kv_cache_dtype": "fp8",
        "attention_config": {"backend": "FLASHMLA_SPARSE", "sparse_mla_force_mqa": True},
        "kv_cache_memory_bytes": cache_bytes,
        "max_model_len": max_model_len,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.2,  # asked for, not taken: others share the device
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }


# In the child


def _serve(spec: dict[str, Any], log: str, pipe: Connection) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        llm, about = _start(spec)
        pipe.send(about)
        while True:
            pipe.send(_run(llm, Load(**pipe.recv())))
    except EOFError:
        llm.llm_engine.engine_core.shutdown()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})
        raise


def _start(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if spec["double_hash"]:
        _double_hash()
    from vllm import LLM

    started = time.monotonic()
    llm = LLM(**spec["arguments"])
    _run(llm, Load(1, 2500, 24, seed=999_999))  # compiles; has the worker map and pin the arena
    _wait_until_pinned(llm)
    cache = llm.llm_engine.vllm_config.cache_config
    about = {
        "started_s": round(time.monotonic() - started, 1),
        "gpu_blocks": cache.num_gpu_blocks,
        "max_concurrency": round(float(cache.kv_cache_max_concurrency or 0), 2),
        "backend": _backends(llm),
    }
    return llm, about


def _run(llm: Any, load: Load) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=load.answer_tokens, ignore_eos=True, detokenize=False)
    numbers = np.random.default_rng(load.seed)
    prompts = numbers.integers(2, 32_000, (load.requests, load.prompt_tokens)).tolist()
    llm.reset_prefix_cache()
    before = _counters(llm)
    with noting_steps(llm) as steps:
        started = time.perf_counter()
        for number, ids in enumerate(prompts):
            llm.llm_engine.add_request(f"{load.seed}-{number}", {"prompt_token_ids": ids}, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        seconds = time.perf_counter() - started
    _settle(llm)
    moved = {name: value - before.get(name, 0) for name, value in _counters(llm).items()}
    return {
        "seconds": seconds,
        "steps": [tuple(step) for step in steps],
        "preemptions": int(moved.pop("num_preemptions", 0)),
        "counters": {name: value for name, value in moved.items() if value},
    }


def _settle(llm: Any, seconds: float = 10.0) -> None:
    """Steps until nothing is left to do: the connector's saves are acknowledged and sealed."""
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + seconds
    while core.scheduler.has_requests() and time.monotonic() < deadline:
        core.step_fn()
        time.sleep(0.001)


def _counters(llm: Any) -> dict[str, float]:
    """vLLM's Prometheus counters of connectors and preemptions, without "vllm:"."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith(("kvsieve_", "hisparse_", "num_preemptions")) and hasattr(metric, "value"):
            found[name] = found.get(name, 0.0) + metric.value
    return found


def _wait_until_pinned(llm: Any, seconds: float = 120.0) -> None:
    """For an engine with this project's connector: until its worker can save."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    half = getattr(connector, "_scheduler", None)
    if worker is not None and hasattr(worker, "_ready"):
        _until(lambda: worker._ready, lambda: None, seconds)
    elif hasattr(half, "_unready"):  # the workers are processes of their own, and report in steps
        _until(lambda: not half._unready, lambda: _run(llm, Load(1, 100, 2, seed=999_997)), seconds)
    else:
        return
    _run(llm, Load(1, 2500, 24, seed=999_998))


def _until(pinned: Callable[[], bool], between: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not pinned():
        if time.monotonic() > deadline:
            raise TimeoutError("the arena was not pinned")
        time.sleep(0.1)
        between()


def _backends(llm: Any) -> list[str]:
    config = llm.llm_engine.vllm_config.compilation_config
    layers = config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return sorted(backends)


def _double_hash() -> None:
    """HiSparse's resolver probes a table of max_union_rows + 1 entries, which one query's top-k fills."""
    from dataclasses import replace

    from vllm.v1.hisparse.runtime import ResolvedHiSparseConfig

    stock = ResolvedHiSparseConfig.from_vllm_config.__func__  # type: ignore[attr-defined]

    def doubled(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = stock(cls, *args, **kwargs)
        return config and replace(config, max_union_rows=2 * config.max_union_rows)

    ResolvedHiSparseConfig.from_vllm_config = classmethod(doubled)  # type: ignore[assignment]
