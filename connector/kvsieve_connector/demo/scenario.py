"""The demo's story: an engine reads a long document, is killed, and the next one reads it from the store."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvsieve_connector.demo import document
from kvsieve_connector.demo.engine import Answer, Engine, wait_for
from kvsieve_connector.demo.model import FOLDER, cache_dir, find_gguf
from kvsieve_connector.demo.processes import Child, DemoError
from kvsieve_connector.demo.steps import Steps
from kvsieve_connector.demo.store import DemoStore

_MODEL_SECONDS = 300.0
_SEAL_SECONDS = 10.0
_METRICS_SECONDS = 5.0

_HITS = "vllm:external_prefix_cache_hits_total"
_LOADED_BYTES = "vllm:kvsieve_loaded_bytes_total"


@dataclass(frozen=True)
class Options:
    """What to run.

    model: folder of a model; None: SmolLM2.
    document: text; None: one is made, of about `tokens` tokens.
    """

    model: Path | None
    document: str | None
    question: str
    tokens: int


@dataclass(frozen=True)
class Run:
    """One engine's answer, and what it took from the store for it: tokens matched, bytes copied."""

    answer: Answer
    matched_tokens: int
    loaded_bytes: int


@dataclass(frozen=True)
class Result:
    """Both runs.

    block_tokens, slot_bytes: of the engines' pool.
    sealed_blocks: in the store when the first engine was killed.
    """

    first: Run
    second: Run
    block_tokens: int
    slot_bytes: int
    sealed_blocks: int

    @property
    def same_answer(self) -> bool:
        return self.first.answer.text == self.second.answer.text != ""

    @property
    def used_store(self) -> bool:
        return self.second.matched_tokens > 0 and self.second.loaded_bytes > 0


def play(options: Options, folder: Path, store: DemoStore, steps: Steps) -> Result:
    """Runs it all against a store that was just started. folder: for logs. Raises DemoError."""
    model = options.model or prepare_model(folder, steps)
    with steps.step("start the store"):
        store.start()

    with ExitStack() as running:
        engine = start_engine("first", model, store, folder, steps, running)
        text = options.document or document.harbour_log(engine.count_tokens, options.tokens)
        prompt = document.prompt(text, options.question)
        blocks = engine.count_tokens(prompt) // block_tokens(store, engine)
        with steps.step(
            f"first engine reads the document; {blocks} blocks of it go to the store",
            lambda: store.sealed_blocks() / max(blocks, 1),
        ):
            first = ask(engine, prompt)
            sealed = int(
                wait_for(
                    store.sealed_blocks,
                    first.answer.prompt_tokens // block_tokens(store, engine),
                    _SEAL_SECONDS,
                )
            )
        with steps.step("kill -9 the first engine"):
            engine.child.kill()

    with ExitStack() as running:
        engine = start_engine("second", model, store, folder, steps, running)
        with steps.step("second engine reads the document"):
            second = ask(engine, prompt)
        pool = store.pool()
        assert pool is not None
        return Result(first, second, pool.block_tokens, pool.slot_bytes, sealed)


def prepare_model(folder: Path, steps: Steps) -> Path:
    """SmolLM2 in the user's cache, made there the first time. Raises DemoError."""
    path = cache_dir() / FOLDER
    if not path.is_dir():
        try:
            find_gguf()
        except FileNotFoundError as error:
            raise DemoError(str(error)) from None
        command = [sys.executable, "-m", "kvsieve_connector.demo.model", str(cache_dir())]
        with (
            steps.step("dequantise SmolLM2-135M-Instruct, once"),
            Child("dequantiser", command, folder / "model.log", os.environ) as child,
        ):
            child.wait(_MODEL_SECONDS)
    return path


def start_engine(
    name: str, model: Path, store: DemoStore, folder: Path, steps: Steps, running: ExitStack
) -> Engine:
    """An engine that serves and has answered a short request; `running` ends it."""
    engine = Engine(model, store.endpoint, folder / f"engine-{name}.log")
    running.callback(engine.child.close)
    with steps.step(f"start the {name} engine"):
        engine.start()
    # Else the time to first token would count what an engine does once, at its first steps.
    with steps.step("warm it up with a short request"):
        engine.warm_up()
    return engine


def block_tokens(store: DemoStore, engine: Engine) -> int:
    """Tokens of a block of the engine's pool. Raises DemoError when the engine has not attached."""
    pool = store.pool()
    if pool is None:
        raise DemoError("the engine did not attach to the store", engine.child.log)
    return pool.block_tokens


def ask(engine: Engine, prompt: str) -> Run:
    """The answer, and by how much the engine's counters went up with it."""
    hits, loaded = engine.counter(_HITS), engine.counter(_LOADED_BYTES)
    answer = engine.ask(prompt)
    # The engine reports its counters a moment after the last token.
    matched = int(engine.counter(_HITS) - hits)
    enough = 1 if matched else 0
    copied = wait_for(lambda: engine.counter(_LOADED_BYTES) - loaded, enough, _METRICS_SECONDS)
    return Run(answer, matched, int(copied))
