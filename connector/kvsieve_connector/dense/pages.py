"""Copies of blocks, out of vLLM's pool and out of the arena's mapped memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvsieve_connector.copy.base import LayerPages

I64Array = npt.NDArray[np.int64]

_memmove = ctypes.memmove  # releases the GIL


class Pages:
    """The layers of a rank, all of one shape.

    layers: in the order of the model. heads: KV heads of this rank. A page is one block in one layer, a piece
    the part of one head in it, contiguous.
    """

    def __init__(self, layers: Sequence[LayerPages], heads: int) -> None:
        """Raises ValueError when the layers' pages differ in size."""
        sizes = {layer.block_bytes for layer in layers}
        if len(sizes) != 1 or any(layer.pages != 1 for layer in layers):
            raise ValueError(f"kvsieve: pages of {sorted(sizes)} bytes in one model, one size expected")
        (self.page_bytes,) = sizes
        self.heads = heads
        self.piece_bytes = self.page_bytes // heads
        self._pool = [(layer.view.data_ptr(), layer.view.stride(0)) for layer in layers]
        self._offsets = [layer.offset for layer in layers]
        self._kept = [layer.view for layer in layers]

    def addresses(self, layer: int, blocks: I64Array, slots: I64Array) -> I64Array:
        """Where pages of a layer are. blocks: ids of vLLM's pool. slots: addresses of the slots that hold the
        blocks in the arena, 0 for one that is in the pool. Both of one shape, and so is the result."""
        base, stride = self._pool[layer]
        found: I64Array = np.where(slots != 0, slots + self._offsets[layer], base + blocks * stride)
        return found

    def copy(self, to: Tensor, addresses: I64Array) -> None:
        """Pages, one after another. to: contiguous. addresses: [n], at most as many as there is room for."""
        at, size = _room(to, addresses.size * self.page_bytes), self.page_bytes
        for address in addresses.tolist():
            _memmove(at, address, size)
            at += size

    def copy_pieces(self, to: Tensor, addresses: I64Array) -> None:
        """Pages put together of pieces: page i gets those of head h from the page at addresses[i, h]."""
        at, size = _room(to, addresses.size * self.piece_bytes), self.piece_bytes
        for address in (addresses + np.arange(self.heads) * size).ravel().tolist():
            _memmove(at, address, size)
            at += size

    def keys(self, layer: int, blocks: I64Array, slots: I64Array, order: Tensor, like: Tensor) -> Tensor:
        """Keys of whole blocks: [n, tokens, heads, dim]. order: packing.key_order(). like: the layer's cache,
        [num_blocks, heads, tokens, 2 * dim]."""
        tokens, width = like.shape[2:]
        pages = like.new_empty((blocks.size, self.heads, tokens * width))
        self.copy(pages, self.addresses(layer, blocks, slots))
        keys = pages[:, :, : tokens * width // 2].index_select(2, order)
        return keys.view(blocks.size, self.heads, tokens, width // 2).transpose(1, 2)


def _room(to: Tensor, wanted: int) -> int:
    """Address of a tensor with room for so many bytes."""
    assert to.is_contiguous()
    assert wanted <= to.nbytes, f"{wanted} bytes for {to.nbytes}"
    return to.data_ptr()
