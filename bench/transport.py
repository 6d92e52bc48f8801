"""Blocks from another store over loopback, against a raw socket, and NIXL where it is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench import nixl, transporting


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.transport", __doc__, arguments)
    save(transporting.measure(nixl_python=os.environ.get(nixl.PYTHON, "")))


if __name__ == "__main__":
    main()
