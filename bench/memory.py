"""The store's own memory with a million blocks in its index."""

from __future__ import annotations

from collections.abc import Sequence

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench import memory


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.memory", __doc__, arguments)
    save(memory.measure())


if __name__ == "__main__":
    main()
