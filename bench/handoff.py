"""From the last block's seal at one store to the match at another; and matches while that one pulls."""

from __future__ import annotations

from bench.output import save
from kvsieve_store.bench import handing_over


def main() -> None:
    save(handing_over.measure())


if __name__ == "__main__":
    main()
