"""How the blocks of the trunk are joined: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from engine.model.config import ModelConfig
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts import ResidualStream
from engine.model.parts.cross_layer import CrossLayerResidual
from engine.model.parts.hyper_connections import HyperConnections
from engine.model.taps import TapCollector
from engine.model.trunks.cross_layer import make_cross_layer
from engine.model.trunks.hyper_connections import make_hyper_connected
from engine.model.trunks.residual_stream import make_residual_stream
from engine.model.weights import Weights


class Trunk(Protocol):
    """All blocks, from the embedding to what the output norm takes."""

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> torch.Tensor:
        """x [B, T, n_embd], embedded tokens; tokens int64 [B, T] -> [B, T, n_embd].

        taps: is shown what every block takes, where one row enters a block; other trunks are not
        asked (engine.model.drafters.config).
        """


_TRUNKS: Mapping[type, Callable[[ModelConfig, Weights, Callable[[int], Weights]], Trunk]] = {
    ResidualStream: make_residual_stream,
    HyperConnections: make_hyper_connected,
    CrossLayerResidual: make_cross_layer,
}


def make_trunk(config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]) -> Trunk:
    """weights: those outside the blocks. of_block: those of a block, asked for in file order."""
    return _TRUNKS[type(config.trunk)](config, weights, of_block)
