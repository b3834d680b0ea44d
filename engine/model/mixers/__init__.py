"""Mixers: the token-mixing halves of blocks, and the recurrences of their states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.memory import Mixer, RopeAndMemory
from engine.model.mixers.attention import (
    Attention,
    LatentAttention,
    SparseAttention,
    SparseLatentAttention,
)
from engine.model.mixers.compressed import CompressedAttention, CompressorRing, compressor_of
from engine.model.mixers.recurrent import (
    DeltaNet,
    Kda,
    LowRankMamba2,
    Mamba,
    Mamba2Mixer,
    ShortConv,
)
from engine.model.parts import MixerPart, StateSize
from engine.model.parts.attention import (
    INDEX_RING,
    AttentionPart,
    CompressedAttentionPart,
    LatentAttentionPart,
    SparseAttentionPart,
    SparseLatentAttentionPart,
)
from engine.model.parts.recurrent import (
    DeltaNetPart,
    KdaPart,
    LowRankMamba2Part,
    Mamba2Part,
    MambaPart,
    ShortConvPart,
)
from engine.model.recurrence import ConvWindow, Recurrence, RecurrentLayout, StateKey, TokenWindow
from engine.model.recurrent_states import DeltaState, ScanState, SsdState
from engine.model.weights import Weights
from kernels.linear.block_parts import Residual, Rows
from kernels.pointwise import add

_MAKE: Mapping[type, Callable[..., Mixer]] = {
    AttentionPart: lambda part, weights, config, layer: Attention(
        part, weights, config.rope, config.eps, layer
    ),
    LatentAttentionPart: LatentAttention,
    SparseAttentionPart: SparseAttention,
    SparseLatentAttentionPart: SparseLatentAttention,
    CompressedAttentionPart: CompressedAttention,
    KdaPart: Kda,
    DeltaNetPart: DeltaNet,
    MambaPart: Mamba,
    Mamba2Part: Mamba2Mixer,
    LowRankMamba2Part: LowRankMamba2,
    ShortConvPart: ShortConv,
}
"""By part, what makes its mixer from (part, weights of the block, configuration, layer). The trunk
makes the mixer of an NgramEmbeddingPart."""
_STATES: Mapping[type, Callable[[Any], Recurrence]] = {
    KdaPart: lambda p: DeltaState(p.n_heads, p.n_heads, p.head_dim, grouped=True, channels=True),
    DeltaNetPart: lambda p: DeltaState(p.n_k_heads, p.n_v_heads, p.d_state, grouped=p.grouped),
    MambaPart: lambda p: ScanState(p.d_state, p.d_inner),
    Mamba2Part: lambda p: SsdState(p.n_heads, p.head_dim, p.n_groups, p.d_state),
}
"""By part, the recurrence of a state that is not a window."""


class MixersSideBySide(Mixer):
    """Several mixers on the same input, with added results."""

    def __init__(self, mixers: list[Mixer]) -> None:
        self._mixers = mixers
        self.reads = tuple(packed for mixer in mixers for packed in mixer.reads)

    def __call__(
        self, x: Rows, around: RopeAndMemory, residual: Residual | None = None
    ) -> torch.Tensor:
        first, *others = (mixer(x, around) for mixer in self._mixers)
        for other in others:
            first = add(first, other)
        return first if residual is None else add(residual.x, first)


def make_mixer(
    parts: tuple[MixerPart, ...], weights: Weights, config: ModelConfig, layer: int
) -> Mixer | None:
    """The mixers of a block as one. layer: index of their states and cells."""
    made = [_MAKE[type(part)](part, weights, config, layer) for part in parts]
    return (made[0] if len(made) == 1 else MixersSideBySide(made)) if made else None


def _recurrence(part: Any, name: str, size: StateSize) -> Recurrence:
    """The recurrence of a part's state of this name."""
    if name == "state":
        return next(make(part) for kind, make in _STATES.items() if isinstance(part, kind))
    if name == "tokens":
        return TokenWindow(part.n_gram)
    if isinstance(part, CompressedAttentionPart):
        width = part.index_dim if name == INDEX_RING else part.head_dim
        return CompressorRing(compressor_of(part, width))
    n_rows, n_channels = size.shape
    return ConvWindow(n_rows + 1, n_channels, activate=not isinstance(part, ShortConvPart))


def layout_of(config: ModelConfig) -> RecurrentLayout | None:
    """The states of a model's recurrent layers; None for a model without any."""
    states = {
        StateKey(layer, name): _recurrence(part, name, size)
        for layer, block in enumerate(config.blocks)
        for part in block.keepers
        for name, size in part.states().items()
    }
    return RecurrentLayout(states) if states else None
