"""`python -m bench [NAME ...]`: the named benchmarks, or all of them, one after another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench import copy, handoff, match, memory, overhead, restart, scale, seal, traces, transport
from bench.arguments import table

_ALL = {
    module.__name__.removeprefix("bench."): module
    for module in (copy, match, seal, memory, transport, handoff, restart, overhead, traces, scale)
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="%(prog)s [-h] [NAME ...]",
        description="The named benchmarks, or all of them, one after another:",
        epilog=table(_ALL),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in _ALL]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(_ALL)}")
    for name in names or _ALL:
        _ALL[name].main([])


if __name__ == "__main__":
    main()
