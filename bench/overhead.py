"""What the connector costs an engine on CPU: prefill and decode with it and without, in turns."""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_connector.demo.model import cache_dir, ensure_smollm2
from kvsieve_store.bench.report import Goal, Report
from kvsieve_store.bench.saving import spawn
from kvsieve_store.bench.store import TemporaryStore

_PREFILL_RATIO = 0.95
_ANSWER_SECONDS = 600.0
_ROOT = Path(__file__).parent.parent

# For engines in child processes: one process and one thread an engine, the cores are shared.
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Case:
    """A model, and what is timed: a prefill of so many tokens, a decode of so many per sequence."""

    model: str
    vocabulary: int
    prefill_tokens: int
    decode_tokens: int
    decode_sequences: int = 4


CASES = (Case("tiny-qwen3", 1024, 4096, 96), Case("smollm2", 49_000, 1024, 24))

_SHORT_PROMPT = 16


def measure(*, repetitions: int = 7, cases: Sequence[Case] = CASES) -> Report:
    """Speed with the connector as a share of that without, the medians of ratios of neighbouring runs.

    Both engines of a case live side by side, each in a process of its own, and answer the same prompts in
    turns. Prompts are random tokens, so that nothing is ever hit: all is computed, and all of it is saved.
    """
    os.environ.update(ENVIRON)
    rows = []
    for case in cases:
        rows += _run_case(case, repetitions)
    goals = [
        Goal(f"prefill with the connector, {row['model']}", row["ratio"], _PREFILL_RATIO, "x")
        for row in rows
        if row["phase"] == "prefill"
    ]
    return Report("overhead", {"repetitions": repetitions, "threads": 1}, rows, goals)


def _run_case(case: Case, repetitions: int) -> list[dict[str, Any]]:
    model = _model(case.model)
    prompts = random.Random(0)
    phases = {
        "prefill": (1, case.prefill_tokens, 1),
        f"decode, {case.decode_sequences} sequences": (
            case.decode_sequences,
            _SHORT_PROMPT,
            case.decode_tokens,
        ),
    }
    rows = []
    with (
        TemporaryStore("--pool-size", "512MiB") as store,
        _Engine(model, None) as plain,
        _Engine(model, store.endpoint) as saving,
    ):
        for phase, (sequences, prompt_tokens, answer_tokens) in phases.items():
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(repetitions + 1):
                batch = [
                    [prompts.randrange(10, case.vocabulary) for _ in range(prompt_tokens)]
                    for _ in range(sequences)
                ]
                for with_connector in (False, True) if turn % 2 else (True, False):
                    engine = saving if with_connector else plain
                    seconds = engine.generate(batch, answer_tokens)
                    if turn:  # the first turn warms up
                        times[with_connector].append(seconds)
            ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
            tokens = sequences * (answer_tokens if answer_tokens > 1 else prompt_tokens)
            rows.append(
                {
                    "model": case.model,
                    "phase": phase,
                    "without_tokens_s": round(tokens / statistics.median(times[False])),
                    "with_tokens_s": round(tokens / statistics.median(times[True])),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 4) for ratio in ratios],
                }
            )
    return rows


class _Engine:
    """A vLLM engine in a process of its own; a context manager."""

    def __init__(self, model: Path, endpoint: str | None) -> None:
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(str(model), endpoint, there), daemon=True)
        self._process.start()

    def __enter__(self) -> _Engine:
        self._receive()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()
        self._process.join(30.0)
        self._process.kill()

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds until each prompt has got its `tokens` tokens."""
        self._pipe.send((prompts, tokens))
        return float(self._receive())

    def _receive(self) -> Any:
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise RuntimeError("the engine does not answer")
        return self._pipe.recv()


def _serve(model: str, endpoint: str | None, pipe: Connection) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {}
    if endpoint is not None:
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVSieveConnector",
            kv_connector_module_path="kvsieve_connector.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"kvsieve.endpoint": endpoint},
        )
    llm = LLM(
        model=model,
        dtype="bfloat16",
        block_size=32,
        max_model_len=8192,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=512 << 20,
        seed=0,
        disable_log_stats=True,
        **settings,
    )
    pipe.send("ready")
    try:
        while True:
            prompts, tokens = pipe.recv()
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            started = time.perf_counter()
            llm.generate(inputs, sampling, use_tqdm=False)
            pipe.send(time.perf_counter() - started)
    except EOFError:
        pass
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def _model(name: str) -> Path:
    """Folder of a model: SmolLM2 as the demo makes it, the tiny ones as the tests do."""
    if name == "smollm2":
        return ensure_smollm2(cache_dir())
    command = [sys.executable, str(_ROOT / "deploy/cpu/make_models.py"), str(_ROOT / ".cache/models"), name]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(made.stdout.strip().splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.overhead", __doc__, arguments)
    save(measure())


if __name__ == "__main__":
    main()
