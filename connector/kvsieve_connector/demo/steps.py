"""What the demo shows while it works: a moving bar for the step at hand, a line for each one that is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_POLL_SECONDS = 0.25

Share = Callable[[], float]
"""How much of a step is done, 0 to 1."""


class Steps:
    """Prints to `console`; bars only where it is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, name: str, share: Share | None = None) -> Iterator[None]:
        """Around the work of one step. share: asked several times a second, from another thread."""
        started = time.monotonic()
        with self._bar(name, share):
            yield
        seconds = time.monotonic() - started
        self._console.print(f"[green]done[/green]  {name} [dim]({seconds:.1f} s)[/dim]", soft_wrap=True)

    @contextmanager
    def _bar(self, name: str, share: Share | None) -> Iterator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(30), TimeElapsedColumn())
        bars = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        with bars as progress:
            task = progress.add_task(name, total=None if share is None else 1.0)
            stop = threading.Event()

            def watch() -> None:
                while share is not None and not stop.wait(_POLL_SECONDS):
                    progress.update(task, completed=min(share(), 1.0))

            thread = threading.Thread(target=watch, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join()
