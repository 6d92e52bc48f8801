"""How many requests a GPU holds with hot buffers of a size."""

from __future__ import annotations

BLOCK_TOKENS = 64
INDEXER_ROW = 132
MAIN_ROW = 656
WINDOW_BLOCKS = 3
"""Two full blocks, and the one that is being filled."""


def requests_held(
    hot_rows: int, *, gpu_bytes: int = 20 << 30, tokens: int = 65_536, layers: int = 61
) -> float:
    """Requests of `tokens` in `gpu_bytes` of cache; the defaults are DeepSeek-V3.2's shapes.

    One pool of pages, each as large as a block of the indexer of all layers. A request has a page per block
    for its indexer, and one per block of hot buffer and window in each group of main layers that fits a page.
    """
    page = layers * INDEXER_ROW * BLOCK_TOKENS
    groups = -(-layers // (page // (MAIN_ROW * BLOCK_TOKENS)))
    hot_blocks = -(-hot_rows // BLOCK_TOKENS)
    pages = -(-tokens // BLOCK_TOKENS) + groups * (hot_blocks + WINDOW_BLOCKS)
    return gpu_bytes // page / pages
