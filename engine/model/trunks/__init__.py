"""Trunks: how the blocks of a model are joined. Here the usual one, a single residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from engine.model.config import ModelConfig
from engine.model.layers import ResidualBlock, make_block
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts import MtpParts, ResidualStream
from engine.model.parts.trunks import CrossLayerResidual, HyperConnections, SinkhornConnections
from engine.model.taps import TapCollector
from engine.model.trunks.cross_layer import make_cross_layer
from engine.model.trunks.hyper_connections import StreamBlock, make_streams
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


class Trunk(Protocol):
    """All blocks, from the embedding to what the output norm takes."""

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> torch.Tensor:
        """x [B, T, n_embd], embedded tokens; tokens int64 [B, T] -> [B, T, n_embd], or the streams
        [B, T, n_streams, n_embd] that a trunk with several hands on.

        taps: is shown what every block takes, one row; trunks that are not TrunkPart.tapped are not
        asked (engine.model.drafters.config).
        """


_TRUNKS: Mapping[type, Callable[[ModelConfig, Weights, Callable[[int], Weights]], Trunk]] = {
    ResidualStream: make_residual_stream,
    HyperConnections: make_streams,
    SinkhornConnections: make_streams,
    CrossLayerResidual: make_cross_layer,
}


def make_trunk(config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]) -> Trunk:
    """weights: those outside the blocks. of_block: those of a block, asked for in file order."""
    return _TRUNKS[type(config.trunk)](config, weights, of_block)


def make_mtp_block(
    parts: MtpParts, weights: Weights, config: ModelConfig
) -> ResidualBlock | StreamBlock:
    """The block of an MTP head: like those of the trunk where this hands it several streams. Its
    attention counts from layer 0 of a memory of its own."""
    make = make_block if config.trunk.n_handed == 1 else StreamBlock
    return make(parts.block, weights, config, 0)
