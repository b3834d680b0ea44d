"""What computes a mixer part, and how tokens advance the states that it keeps: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from engine.model.config import ModelConfig
from engine.model.mixers import (
    attention,
    delta_net,
    kda,
    latent_attention,
    mamba2,
    ngram_embedding,
    short_conv,
    sparse_attention,
)
from engine.model.mixers.mixer import Mixer, RopeAndMemory
from engine.model.parts import MixerPart
from engine.model.parts.attention import AttentionPart
from engine.model.parts.delta_net import DeltaNetPart
from engine.model.parts.kda import KdaPart
from engine.model.parts.latent_attention import LatentAttentionPart
from engine.model.parts.mamba2 import Mamba2Part
from engine.model.parts.ngram_embedding import NgramEmbeddingPart
from engine.model.parts.short_conv import ShortConvPart
from engine.model.parts.sparse_attention import SparseAttentionPart
from engine.model.recurrence import Recurrence, RecurrentLayout, StateKey
from engine.model.weights import Weights
from kernels.pointwise import add


class _Row(NamedTuple):
    """make: (part, weights of the block, configuration, layer); None for what the trunk makes.
    recurrences: of a part, by the names it gives its states."""

    make: Callable[..., Mixer] | None
    recurrences: Callable[[Any], Mapping[str, Recurrence[Any]]] = lambda part: {}


_MIXERS: Mapping[type, _Row] = {
    AttentionPart: _Row(attention.Attention),
    LatentAttentionPart: _Row(latent_attention.LatentAttention),
    KdaPart: _Row(kda.Kda, kda.recurrences),
    DeltaNetPart: _Row(delta_net.DeltaNet, delta_net.recurrences),
    Mamba2Part: _Row(mamba2.Mamba2, mamba2.recurrences),
    ShortConvPart: _Row(short_conv.ShortConv, short_conv.recurrences),
    SparseAttentionPart: _Row(sparse_attention.SparseAttention),
    NgramEmbeddingPart: _Row(None, ngram_embedding.recurrences),
}


class MixersSideBySide:
    """Several mixers on the same input, their results added."""

    def __init__(self, mixers: list[Mixer]) -> None:
        self._mixers = mixers

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape."""
        first, *others = (mixer(x, around) for mixer in self._mixers)
        for other in others:
            first = add(first, other)
        return first


def make_mixer(
    parts: tuple[MixerPart, ...], weights: Weights, config: ModelConfig, layer: int
) -> Mixer | None:
    """The mixers of a block as one. layer: under which they find their states and cells."""
    rows = ((part, _MIXERS[type(part)].make) for part in parts)
    made = [make(part, weights, config, layer) for part, make in rows if make]
    return (made[0] if len(made) == 1 else MixersSideBySide(made)) if made else None


def layout_of(config: ModelConfig) -> RecurrentLayout | None:
    """What the recurrent layers of a model keep; None for one without."""
    states = {
        StateKey(layer, name): recurrence
        for layer, block in enumerate(config.blocks)
        for part in block.keepers
        for name, recurrence in _MIXERS[type(part)].recurrences(part).items()
    }
    return RecurrentLayout(states) if states else None
