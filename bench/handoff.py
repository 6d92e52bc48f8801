"""From the last block's seal at one store to the match at another; and matches while that one pulls."""

from __future__ import annotations

from collections.abc import Sequence

from bench.arguments import no_arguments
from bench.output import save
from kvsieve_store.bench import handing_over


def main(arguments: Sequence[str] | None = None) -> None:
    no_arguments("bench.handoff", __doc__, arguments)
    save(handing_over.measure())


if __name__ == "__main__":
    main()
