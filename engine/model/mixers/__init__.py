"""Mixers: the token-mixing halves of blocks, and how tokens advance the states that they keep."""

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
from engine.model.mixers.compressed import CompressedAttention, ring_recurrences
from engine.model.mixers.ngram_embedding import ngram_recurrences
from engine.model.mixers.recurrent import (
    DeltaNet,
    Kda,
    LowRankMamba2,
    Mamba,
    Mamba2Mixer,
    ShortConv,
    delta_net_recurrences,
    kda_recurrences,
    mamba2_recurrences,
    mamba_recurrences,
    short_conv_recurrences,
)
from engine.model.parts import MixerPart
from engine.model.parts.attention import (
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
    NgramEmbeddingPart,
    ShortConvPart,
)
from engine.model.recurrence import Recurrence, RecurrentLayout, StateKey
from engine.model.weights import Weights
from kernels.linear import Rows
from kernels.pointwise import add

_MAKE: Mapping[type, Callable[..., Mixer]] = {
    AttentionPart: Attention,
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
"""By part, what makes its mixer of (part, weights of the block, configuration, layer). The mixer of
an NgramEmbeddingPart is made by the trunk."""
_RECURRENCES: Mapping[type, Callable[[Any], Mapping[str, Recurrence]]] = {
    KdaPart: kda_recurrences,
    DeltaNetPart: delta_net_recurrences,
    MambaPart: mamba_recurrences,
    Mamba2Part: mamba2_recurrences,
    LowRankMamba2Part: mamba2_recurrences,
    ShortConvPart: short_conv_recurrences,
    NgramEmbeddingPart: ngram_recurrences,
    CompressedAttentionPart: ring_recurrences,
}
"""By part, how tokens advance its states, by the names it gives them."""


class MixersSideBySide(Mixer):
    """Several mixers on the same input, their results added."""

    def __init__(self, mixers: list[Mixer]) -> None:
        self._mixers = mixers
        self.reads = tuple(packed for mixer in mixers for packed in mixer.reads)

    def __call__(
        self, x: Rows, around: RopeAndMemory, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        first, *others = (mixer(x, around) for mixer in self._mixers)
        for other in others:
            first = add(first, other)
        return first if residual is None else add(residual, first)


def make_mixer(
    parts: tuple[MixerPart, ...], weights: Weights, config: ModelConfig, layer: int
) -> Mixer | None:
    """The mixers of a block as one. layer: under which they find their states and cells."""
    made = [_MAKE[type(part)](part, weights, config, layer) for part in parts]
    return (made[0] if len(made) == 1 else MixersSideBySide(made)) if made else None


def layout_of(config: ModelConfig) -> RecurrentLayout | None:
    """What the recurrent layers of a model keep; None for one without."""
    states = {
        StateKey(layer, name): recurrence
        for layer, block in enumerate(config.blocks)
        for part in block.keepers
        if (recurrences := _RECURRENCES.get(type(part)))
        for name, recurrence in recurrences(part).items()
    }
    return RecurrentLayout(states) if states else None
