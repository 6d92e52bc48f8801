"""`python -m bench.gpu NAME [ARGUMENTS]`, or `all`: benchmarks on a CUDA device."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "swap_in": "rows of a layer into the hot buffer, against HiSparse's ops, per layer in a CUDA graph",
    "swap_in_tp": "the same on all GPUs at once: each fetches all, or its share and the rest from the others",
    "capacity": "64k-token requests that a cache of 20 GiB holds at DeepSeek-V3.2's shapes (needs no device)",
    "serve": "time between tokens and decode throughput of engines: stock, kvsieve, HiSparse",
    "copies": "copies between paged cache and arena by size of the piece: DMA against the kernel",
    "prefill": "prefill with and without the connector, and the speed of copies to the arena",
}


def main(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        for known, text in NAMES.items():
            print(f"  {known:10} {text}")
        print("  all        one after another\n\nNAME --help lists the arguments of one.")
        return 0
    if name != "all" and name not in NAMES:
        print(f"no benchmark {name}; there are {', '.join(NAMES)} and all", file=sys.stderr)
        return 2
    for each in NAMES if name == "all" else [name]:
        importlib.import_module(f"bench.gpu.{each}").main(rest if name != "all" else [])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
