"""The command line of `kvsieve demo`."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvsieve_connector.demo.document import QUESTION


def demo(
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text to read. Default: one is made."),
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask about it.")] = QUESTION,
    tokens: Annotated[
        int, typer.Option(min=256, max=7500, help="Length of the text that is made, about.")
    ] = 6000,
    keep_store: Annotated[bool, typer.Option("--keep-store", help="Leave the store running.")] = False,
) -> None:
    """Kill a real vLLM engine; watch the next one answer from the store.

    Succeeds if both engines give the same answer and the second one took KV from the store.
    """
    from kvsieve_connector.demo import report, scenario
    from kvsieve_connector.demo.processes import DemoError, tail
    from kvsieve_connector.demo.steps import Steps
    from kvsieve_connector.demo.store import DemoStore

    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)
    text = document.read_text() if document else None
    folder = Path(tempfile.mkdtemp(prefix="kvsieve-demo-"))
    store = DemoStore(folder)
    kept = False
    try:
        options = scenario.Options(model, text, question, tokens)
        result = scenario.play(options, folder, store, Steps(console))
        report.show(console, result)
        ok = result.same_answer and result.used_store
        kept = keep_store
    except DemoError as error:
        if error.log is not None:
            print_log(error.log, tail(error.log))
        raise
    finally:
        if not kept:
            store.child.close()
            shutil.rmtree(folder, ignore_errors=True)
    if kept:
        console.print(f"the store stays at {store.endpoint}; its log is in {folder}", soft_wrap=True)
        console.print(f"end it with: kvsieve drain --endpoint {store.endpoint}", soft_wrap=True)
    raise typer.Exit(0 if ok else 1)


def print_log(log: Path, lines: str) -> None:
    """The end of a child's log, on standard error."""
    Console(stderr=True, highlight=False).print(Text(f"--- end of {log.name}\n{lines}\n---", style="dim"))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the demo as Ctrl-C does: with everything that it has started."""
    raise KeyboardInterrupt
