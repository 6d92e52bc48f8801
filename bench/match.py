"""Match of 1,000 keys while sessions save."""

from __future__ import annotations

from collections.abc import Sequence

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench import matching
from kvsieve_store.bench.store import TemporaryStore


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.match", __doc__, arguments)
    with TemporaryStore("--pool-size", "512MiB") as store:
        save(matching.measure(store.endpoint))


if __name__ == "__main__":
    main()
