"""Changes: who wants to know which blocks come and go."""

from __future__ import annotations

from typing import Protocol


class Changes(Protocol):
    """Told of every block, in the order in which it happens; must be quick, and can't refuse.

    family_id: 32 bytes. keys: 32 bytes each, end to end; at least one.
    """

    def sealed(self, family_id: bytes, keys: bytes) -> None:
        """These can be matched from now on."""

    def dropped(self, family_id: bytes, keys: bytes) -> None:
        """These can't any more."""
