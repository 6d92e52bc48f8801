"""What a trace is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """The top-k positions of one request's decode steps.

    topk: [steps, layers, k] uint16, positions, ascending, no two alike.
    start: tokens before the first step: step s reads positions below start + s + 1, itself included.
    block_tokens: tokens per block, scaled as k is to 2,048.
    leaders: for each layer the layer whose index it uses.
    """

    name: str
    topk: npt.NDArray[np.uint16]
    start: int
    block_tokens: int
    leaders: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.topk)

    @property
    def layers(self) -> int:
        return len(self.leaders)

    @property
    def k(self) -> int:
        return int(self.topk.shape[2])

    @property
    def tokens(self) -> int:
        """Positions that there are at the end."""
        return self.start + self.steps

    def window(self, step: int, blocks: int) -> int:
        """First position that is read from the GPU: `blocks` full blocks and the one that is being filled."""
        filled = (self.start + step + 1) // self.block_tokens
        return max(0, filled - blocks) * self.block_tokens

    def step_overlap(self) -> npt.NDArray[np.float64]:
        """[layers]: mean share of a step's positions that the step before had too."""
        both = [
            [_common(self.topk[step - 1, layer], self.topk[step, layer]) for layer in range(self.layers)]
            for step in range(1, self.steps)
        ]
        return np.asarray(np.mean(both, axis=0) / self.k)

    def layer_overlap(self) -> npt.NDArray[np.float64]:
        """[layers - 1]: mean share of a layer's positions that the layer before had too, from layer 1 on."""
        both = [
            [_common(self.topk[step, layer - 1], self.topk[step, layer]) for layer in range(1, self.layers)]
            for step in range(self.steps)
        ]
        return np.asarray(np.mean(both, axis=0) / self.k)

    def new_layer_overlap(self) -> float:
        """The same over all layers, only of positions that the step before did not have."""
        new = common = 0
        for step in range(1, self.steps):
            for layer in range(1, self.layers):
                came = np.setdiff1d(self.topk[step, layer], self.topk[step - 1, layer], assume_unique=True)
                new += len(came)
                common += _common(came, self.topk[step, layer - 1])
        return common / new if new else 0.0


def _common(a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16]) -> int:
    return len(np.intersect1d(a, b, assume_unique=True))
