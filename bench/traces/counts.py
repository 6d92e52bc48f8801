"""What the swap-ins of a run did, added up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows, by the names and with the meanings of kernels/tables.py:COUNTERS."""

    asked_rows: int = 0
    gpu_rows: int = 0
    hot_rows_hit: int = 0
    missed_rows: int = 0
    prefetched_rows: int = 0
    prefetched_rows_used: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the rows not in blocks of the pool that the hot buffer had; 1 if there were none."""
        rows = self.hot_rows_hit + self.missed_rows
        return self.hot_rows_hit / rows if rows else 1.0

    @property
    def prefetched_rows_wasted(self) -> int:
        """Rows prefetched and not used; those that may be yet are among them."""
        return self.prefetched_rows - self.prefetched_rows_used

    def swapped_in_bytes(self, row_bytes: int) -> int:
        """Bytes read from the arena, by swap-ins and prefetches."""
        return (self.missed_rows + self.prefetched_rows) * row_bytes
