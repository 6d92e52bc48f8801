"""What stands behind `python -m bench.NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType


def no_arguments(name: str, text: str | None, arguments: Sequence[str] | None) -> None:
    """Of a benchmark that takes none: --help prints the text, anything else the usage; both exit.

    name: of the module. arguments: None for those of the process.
    """
    argparse.ArgumentParser(prog=f"python -m {name}", description=text).parse_args(arguments)


def table(modules: dict[str, ModuleType]) -> str:
    """A line per benchmark: its name and the first line of its docstring."""
    lines = [f"  {name:10} {(module.__doc__ or '').splitlines()[0]}" for name, module in modules.items()]
    return "\n".join(lines)
