"""`make pd`: a prefill host and a decode host on this machine, with a proxy in front, until Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, get_args

import typer
from rich.console import Console

from kvsieve_connector.demo.document import QUESTION, harbour_log, prompt
from kvsieve_connector.demo.engine import Engine, wait_for
from kvsieve_connector.demo.processes import Child, DemoError, free_port, tail
from kvsieve_connector.demo.scenario import prepare_model
from kvsieve_connector.demo.steps import Steps
from kvsieve_connector.demo.store import DemoStore
from kvsieve_pd.proxy.settings import Flow, ProxySettings

_PROXY_SECONDS = 30.0
_POLL_SECONDS = 0.5
_METRICS_SECONDS = 15.0
_TRY_TOKENS = 300
_PULLED, _PULLED_BYTES = "vllm:kvsieve_pulled_blocks_total", "vllm:kvsieve_pulled_bytes_total"


def pd(
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of the proxy; 0: any that is free.")] = 8000,
    flow: Annotated[str, typer.Option(help="sequential or overlapped.")] = ProxySettings.flow,
) -> None:
    """Start two stores, a prefill engine, a decode engine and the proxy; end them all at Ctrl-C."""
    if flow not in get_args(Flow):
        raise typer.BadParameter(f"flow: {flow!r} given, sequential or overlapped expected")
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="kvsieve-pd-"))
    try:
        with ExitStack() as running:
            model = model or prepare_model(folder, Steps(console))
            url, decode, children = _start(model, port or free_port(), flow, folder, Steps(console), running)
            _try(console, decode, url)
            _say(console, url, model.name, folder)
            _watch(children)
    except KeyboardInterrupt:
        console.print("all ended")
    except DemoError as error:
        console.print(f"{error}\n{tail(error.log) if error.log else ''}", markup=False)
        raise typer.Exit(1) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    model: Path, port: int, flow: str, folder: Path, steps: Steps, running: ExitStack
) -> tuple[str, Engine, list[Child]]:
    """Everything, in order; `running` ends it. The proxy's URL, the decode engine, and the processes. Raises
    DemoError."""
    stores: dict[str, DemoStore] = {}
    peers = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
    for role, address in peers.items():
        flags = ["--listen", address, "--peer-listen", f"127.0.0.1:{free_port()}"]
        flags += ["--peer-allow", ",".join(peers.values())]
        stores[role] = DemoStore(folder, f"{role}-store", flags)
        running.callback(stores[role].child.close)
    with steps.step("start a store for prefill and one for decode"):
        for store in stores.values():
            store.start()
    # One after the other: each takes a core for half a minute.
    engines: dict[str, Engine] = {}
    for role, store in stores.items():
        with steps.step(f"start the {role} engine"):
            name = f"{role} engine"
            log = folder / f"{role}-engine.log"
            engines[role] = Engine(model, store.endpoint, log, name, _cores(role == "decode"))
            running.callback(engines[role].child.close)
            engines[role].start()
            # What is done once a process takes a minute on two busy cores; decode would wait for it in vain.
            engines[role].warm_up()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvsieve_pd.proxy", "--listen", f"127.0.0.1:{port}", "--flow", flow]
    prefill, decode = engines["prefill"].url, engines["decode"].url
    command += ["--prefill", f"{prefill}={peers['prefill']}", "--decode", decode]
    # Two engines on the same few cores take their time.
    command += ["--wait-ms", "120000"]
    proxy = Child("proxy", command, folder / "proxy.log", os.environ)
    running.callback(proxy.close)
    with steps.step("start the proxy"):
        proxy.wait_until(lambda: _answers(url), _PROXY_SECONDS)
    children = [store.child for store in stores.values()] + [engine.child for engine in engines.values()]
    return url, engines["decode"], [*children, proxy]


def _cores(second: bool) -> list[int]:
    """A half of this machine's cores: on the same ones, an engine that waits for blocks keeps the one that
    computes them from running."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (cores[half:] if second else cores[:half]) or cores


def _try(console: Console, decode: Engine, url: str) -> None:
    """A first request, whose prompt takes several blocks, and what of it came from the prefill host. Raises
    DemoError when nothing did."""
    document = harbour_log(decode.count_tokens, _TRY_TOKENS)
    answer = decode.ask(prompt(document, QUESTION), proxy=url)
    pulled = int(wait_for(lambda: decode.counter(_PULLED), 1, _METRICS_SECONDS))
    if not pulled:
        raise DemoError("the decode host answered without a block from the prefill host", decode.child.log)
    megabytes = decode.counter(_PULLED_BYTES) / 1e6
    console.print(
        f"asked with a prompt of {answer.prompt_tokens:,} tokens: {pulled} blocks pulled "
        f"({megabytes:.1f} MB), first token after {answer.ttft:.1f} s: {answer.text}",
        markup=False,
        soft_wrap=True,
    )


def _say(console: Console, url: str, model: str, folder: Path) -> None:
    message = '"messages": [{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{model}", "max_tokens": 32, "stream": true, {message}}}'
    lines = [
        "",
        "ask:",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "look:",
        f"  curl {url}/health",
        f"  curl -s {url}/metrics | grep kvsieve_proxy_requests_total",
        f"  {_kvsieve()} pools --endpoint unix://{folder}/decode-store.sock",
        f"logs are in {folder}; Ctrl-C ends all of it",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _kvsieve() -> str:
    """The command: of the environment that this runs in, where that has one."""
    command = Path(sys.executable).with_name("kvsieve")
    return str(command) if command.exists() else "kvsieve"


def _watch(children: list[Child]) -> None:
    """Until Ctrl-C. Raises DemoError when one of them ends by itself."""
    while True:
        for child in children:
            if not child.alive():
                raise DemoError(f"the {child.name} has ended", child.log)
        time.sleep(_POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends it as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(pd)
