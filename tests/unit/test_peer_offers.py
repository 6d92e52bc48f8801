"""How long offers last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve_store.errors import NotFoundError
from kvsieve_store.peers.offers import Offers, _Offer
from kvsieve_store.protocol.limits import MAX_LEASE_MS


def test_no_offer_outlasts_the_lease_on_its_blocks() -> None:
    """Else blocks would be read that are others' by then."""
    core: Any = SimpleNamespace(now=lambda: 1000.0)
    offers = Offers(core, None, None)  # type: ignore[arg-type]
    offer = offers._offers[b"token"] = _Offer(None, 1100.0, 1015.0, b"")  # type: ignore[arg-type]
    offers.renew(b"token", 15_000)
    assert offer.ends == 1015.0
    offers.renew(b"token", 60_000)
    assert offer.ends == 1060.0
    offers.renew(b"token", MAX_LEASE_MS)
    assert offer.ends == 1100.0
    with pytest.raises(NotFoundError, match="no such offer"):
        offers.renew(b"other", 1)
