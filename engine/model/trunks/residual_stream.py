"""The usual trunk: one residual stream through all blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.model.config import ModelConfig
from engine.model.layers import ResidualBlock, make_block
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.taps import TapCollector
from engine.model.weights import Weights


class BlockAfterBlock:
    """Each block takes what the one before it gives."""

    def __init__(self, blocks: Sequence[ResidualBlock]) -> None:
        self._blocks = tuple(blocks)

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> torch.Tensor:
        """See engine.model.trunks.Trunk."""
        for i, block in enumerate(self._blocks):
            taps.enters(i, x)
            x = block(x, around)
        return x


def make_residual_stream(
    config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]
) -> BlockAfterBlock:
    """See engine.model.trunks.make_trunk."""
    return BlockAfterBlock(
        [make_block(parts, of_block(i), config, i) for i, parts in enumerate(config.blocks)]
    )
