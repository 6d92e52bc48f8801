"""Blocks from another store over loopback, against a raw socket."""

from __future__ import annotations

from bench.output import save
from kvsieve_store.bench import transporting


def main() -> None:
    save(transporting.measure())


if __name__ == "__main__":
    main()
