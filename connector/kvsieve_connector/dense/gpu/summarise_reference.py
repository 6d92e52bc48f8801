"""What `summarise` means, in torch on CPU; addresses are of this process's memory."""

from __future__ import annotations

import ctypes

import torch

from kvsieve_connector.dense.selectors import make_selector
from kvsieve_connector.kernels.summarise import KeySources, check_summarise

__all__ = ["summarise"]


def summarise(
    sources: KeySources, selector: str, source: torch.Tensor, page: torch.Tensor, summaries: torch.Tensor
) -> None:
    """As summarise.summarise."""
    check_summarise(sources, selector, source, page, summaries)
    _, heads, tokens, columns = sources.caches[0].shape
    made = make_selector(selector, columns // 2, tokens)
    for layer, cache in enumerate(sources.caches):
        size = heads * tokens * columns * cache.element_size()
        for where, at in zip(source.tolist(), page.tolist(), strict=True):
            if where < 0:
                block = cache[-1 - where]
            else:
                data = bytearray(ctypes.string_at(where + int(sources.offsets[layer]), size))
                block = torch.frombuffer(data, dtype=cache.dtype).view(heads, tokens, columns)
            keys = block[..., : columns // 2].transpose(0, 1).unsqueeze(0)
            summaries[layer, :, at] = made.summarise(keys)[0].to(summaries.dtype)
