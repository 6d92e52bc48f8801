"""The store's own memory with a million blocks in its index."""

from __future__ import annotations

from kvsieve_store.bench import memory

from bench.output import save


def main() -> None:
    save(memory.measure())


if __name__ == "__main__":
    main()
