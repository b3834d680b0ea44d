"""The trunk with cross-layer residual attention: layers look back at where streams began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, make_feed_forward
from engine.model.mixers import make_mixer
from engine.model.mixers.mixer import Mixer, RopeAndMemory
from engine.model.parts.cross_layer import CrossLayerResidual
from engine.model.taps import TapCollector
from engine.model.weights import Weights
from kernels.norm import rms_norm
from kernels.pointwise import add
from kernels.rows import copy_rows
from kernels.rows.row_mixture import mix_rows


class _Half(NamedTuple):
    """What one half of a block reads its input with: the weight of the scores, then the norm."""

    score: torch.Tensor
    norm: torch.Tensor


class _Block(NamedTuple):
    mixer: Mixer
    ffn: FeedForward
    before_mixer: _Half
    before_ffn: _Half


class CrossLayerStream:
    """A layer that begins a group of `group` leaves its raw input behind and starts a new stream
    with what its mixer gives. What halves of blocks read is the softmax-weighted sum of those
    inputs and of the stream; a score is the sum of the row, RMS-normed, times a weight. Every
    token looks at itself alone."""

    def __init__(
        self, blocks: Sequence[_Block], group: int, score: torch.Tensor, eps: float
    ) -> None:
        self._blocks = tuple(blocks)
        self._group, self._score, self._eps = group, score, eps

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> torch.Tensor:
        """See engine.model.trunks.Trunk."""
        # a row of inputs for each group
        left = x.new_empty(-(-len(self._blocks) // self._group), *x.shape)
        n_left, invariant = 0, around.invariant
        for i, block in enumerate(self._blocks):
            read = self._read(x, left[:n_left], block.before_mixer, invariant)
            added = block.mixer(read, around)
            if i % self._group == 0:
                copy_rows(left[n_left], x)
                n_left += 1
                x = added
            else:
                x = add(x, added)
            normed = self._read(x, left[:n_left], block.before_ffn, invariant)
            x = add(x, block.ffn(normed, invariant=invariant))
        return self._mix(x, left, self._score, invariant)

    def _read(
        self, x: torch.Tensor, left: torch.Tensor, half: _Half, invariant: bool
    ) -> torch.Tensor:
        return rms_norm(self._mix(x, left, half.score, invariant), half.norm, self._eps)

    def _mix(
        self, x: torch.Tensor, left: torch.Tensor, score: torch.Tensor, invariant: bool
    ) -> torch.Tensor:
        return mix_rows(x, left, score, self._eps, invariant=invariant) if len(left) else x


def make_cross_layer(
    config: ModelConfig, weights: Weights, of_block: Callable[[int], Weights]
) -> CrossLayerStream:
    """See engine.model.trunks.make_trunk."""
    assert isinstance(config.trunk, CrossLayerResidual)
    blocks = []
    for i, parts in enumerate(config.blocks):
        inside = of_block(i)
        mixer = make_mixer(parts.mixers, inside, config, i)
        assert mixer is not None
        assert parts.ffn is not None
        assert parts.mixer_norm is not None
        assert parts.ffn_norm is not None
        ffn = make_feed_forward(parts.ffn, inside, config.eps)
        blocks.append(
            _Block(
                mixer,
                ffn,
                _half(inside, "attn_res_score.weight", parts.mixer_norm),
                _half(inside, "ffn_res_score.weight", parts.ffn_norm),
            )
        )
    score = weights.keep("output_res_score.weight")
    return CrossLayerStream(blocks, config.trunk.group, score, config.eps)


def _half(weights: Weights, score: str, norm: str | None) -> _Half:
    assert norm is not None  # what is read is normed by the block
    return _Half(weights.keep(score), weights.keep(norm))
