"""Blocks a second through reserve and seal."""

from __future__ import annotations

from collections.abc import Sequence

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench import sealing
from kvsieve_store.bench.store import TemporaryStore


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.seal", __doc__, arguments)
    with TemporaryStore("--pool-size", "512MiB") as store:
        save(sealing.measure(store.endpoint))


if __name__ == "__main__":
    main()
