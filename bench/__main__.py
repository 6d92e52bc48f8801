"""`python -m bench [NAME ...]`: the named benchmarks, or all of them, one after another."""

from __future__ import annotations

import sys

from bench import copy, handoff, match, memory, overhead, restart, scale, seal, traces, transport

_ALL = {
    module.__name__.removeprefix("bench."): module
    for module in (copy, match, seal, memory, transport, handoff, restart, overhead, traces, scale)
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in _ALL]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(_ALL)}", file=sys.stderr)
        return 2
    for name in names or _ALL:
        _ALL[name].main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
