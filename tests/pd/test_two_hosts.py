"""A prompt prefilled on one host decodes on another, whatever happens on the way."""

from __future__ import annotations

import pytest

from tests.pd.cluster import Cluster, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_up(pd: Cluster, plain_engine: Engine) -> None:
    print(pd.prefill.engine.url, pd.decode.engine.url)
