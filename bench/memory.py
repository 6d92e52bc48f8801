"""The store's own memory with a million blocks in its index."""

from __future__ import annotations

from bench.output import save
from kvsieve_store.bench import memory


def main() -> None:
    save(memory.measure())


if __name__ == "__main__":
    main()
