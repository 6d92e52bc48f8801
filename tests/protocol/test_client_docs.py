"""docs/client.md: its example runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.protocol.client_stores import store_thread

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_example_saves_once_and_finds_twice() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with store_thread(extent_size=4 << 20, pool_size=64 << 20) as endpoint:
        for printed in ("0 blocks found, 2 saved\n", "2 blocks found, 0 saved\n"):
            ran = subprocess.run([sys.executable, "-c", example, endpoint], capture_output=True, text=True)
            assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr
