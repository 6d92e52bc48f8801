"""`python -m bench.gpu NAME [ARGUMENTS]`, or `all`: benchmarks on a CUDA device."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

NAMES = {
    "swap_in": "rows of a layer into the hot buffer, against HiSparse's ops, per layer in a CUDA graph",
    "swap_in_tp": "the same on all GPUs at once: each fetches all, or its share and the rest from the others",
    "pick": "a dense model's picking: scores, look-up and fetched blocks, per layer in a CUDA graph",
    "dense": "the same as serve for a dense model: stock against kvsieve",
    "capacity": "64k-token requests that a cache of 20 GiB holds at DeepSeek-V3.2's shapes (needs no device)",
    "serve": "time between tokens and decode throughput of engines: stock, kvsieve, HiSparse",
    "copies": "copies between paged cache and arena by size of the piece: DMA against the kernel",
    "prefill": "prefill with and without the connector, and the speed of copies to the arena",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        usage="%(prog)s [-h] NAME|all [ARGUMENTS]",
        description="Benchmarks on a CUDA device, or all, one after another. NAME --help: arguments of one.",
        epilog="\n".join(f"  {name:10} {text}" for name, text in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    name, rest = parser.parse_args(given[:1]).name, given[1:]
    if name != "all" and name not in NAMES:
        parser.error(f"no benchmark {name or 'named'}; there are {', '.join(NAMES)} and all")
    if name == "all" and rest:
        parser.error(f"all takes no arguments, {rest[0]} given")
    for each in NAMES if name == "all" else [name]:
        importlib.import_module(f"bench.gpu.{each}").main(rest)


if __name__ == "__main__":
    main()
