"""Trunks: how the blocks of a model are joined. This module has the single residual stream, and
cross-layer residual attention: layers read the inputs of earlier groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.feed_forward import make_feed_forward
from engine.model.layers import ResidualBlock, TapCollector
from engine.model.memory import RopeAndMemory
from engine.model.mixers import make_mixer
from engine.model.parts import BlockParts, MtpParts, TrunkPart
from engine.model.parts.trunks import CrossLayerResidual, HyperConnections, SinkhornConnections
from engine.model.trunks.hyper_connections import OfBlock, StreamBlock, StreamTrunk
from engine.model.weights import Weights
from kernels.norm import rms_norm, rms_norm_rows
from kernels.norm.row_mixture import mix_rows
from kernels.pointwise import add
from kernels.rows import copy_rows


class BlockAfterBlock:
    """Each block's output is the next one's input; a block also computes the next one's norm."""

    def __init__(self, config: ModelConfig, weights: Weights, of_block: OfBlock) -> None:
        parts = enumerate(config.blocks)
        self._blocks = tuple(ResidualBlock(one, of_block(i), config, i) for i, one in parts)
        self._next = *(block.norm for block in self._blocks[1:]), None

    def __call__(
        self, x: Tensor, tokens: Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> Tensor:
        normed = rms_norm_rows(x, *self._blocks[0].norm)
        for i, (block, then) in enumerate(zip(self._blocks, self._next, strict=True)):
            taps.enters(i, x)
            x, normed = block.advance(x, normed, around, then)
        return x


class _Block:
    """Mixer and feed-forward part, each after score weights and a norm."""

    def __init__(
        self, parts: BlockParts, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        mixer = make_mixer(parts.mixers, weights, config, layer)
        assert mixer is not None  # such blocks have both halves, each with a norm
        assert parts.ffn is not None
        assert parts.mixer_norm is not None
        assert parts.ffn_norm is not None
        self.mixer = mixer
        self.ffn = make_feed_forward(parts.ffn, weights, config.eps)
        self.before_mixer = weights.keep("attn_res_score.weight"), weights.keep(parts.mixer_norm)
        self.before_ffn = weights.keep("ffn_res_score.weight"), weights.keep(parts.ffn_norm)


class CrossLayerStream:
    """The first layer of a group of `group` saves its raw input and starts a new stream with its
    mixer's output. Halves of blocks read the softmax-weighted sum of the saved inputs and the
    stream; the score of a row is the sum of the RMS-normed row times a weight. Every token mixes
    only its own rows."""

    def __init__(self, config: ModelConfig, weights: Weights, of_block: OfBlock) -> None:
        assert isinstance(config.trunk, CrossLayerResidual)
        parts = enumerate(config.blocks)
        self._blocks = tuple(_Block(one, of_block(i), config, i) for i, one in parts)
        self._group, self._eps = config.trunk.group, config.eps
        self._score = weights.keep("output_res_score.weight")

    def __call__(
        self, x: Tensor, tokens: Tensor, around: RopeAndMemory, taps: TapCollector
    ) -> Tensor:
        # one row of saved inputs per group
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
        self, x: Tensor, left: Tensor, before: tuple[Tensor, Tensor], invariant: bool
    ) -> Tensor:
        score, norm = before
        return rms_norm(self._mix(x, left, score, invariant), norm, self._eps)

    def _mix(self, x: Tensor, left: Tensor, score: Tensor, invariant: bool) -> Tensor:
        return mix_rows(x, left, score, self._eps, invariant=invariant) if len(left) else x


Trunk = Callable[[Tensor, Tensor, RopeAndMemory, TapCollector], Tensor]
"""All blocks, from the embedding to the input of the output norm: x [B, T, n_embd], embedded
tokens; tokens int64 [B, T] -> [B, T, n_embd], or the streams [B, T, n_streams, n_embd] if several
are passed on. Taps get every block's input, one row; they are only used with trunks that are
TrunkPart.tapped (engine.model.drafters.config)."""


_TRUNKS: Mapping[type, Callable[[ModelConfig, Weights, OfBlock], Trunk]] = {
    TrunkPart: BlockAfterBlock,
    HyperConnections: StreamTrunk,
    SinkhornConnections: StreamTrunk,
    CrossLayerResidual: CrossLayerStream,
}


def make_trunk(config: ModelConfig, weights: Weights, of_block: OfBlock) -> Trunk:
    """weights: those outside the blocks. of_block: those of a block, called in file order."""
    return _TRUNKS[type(config.trunk)](config, weights, of_block)


def make_mtp_block(
    parts: MtpParts, weights: Weights, config: ModelConfig
) -> ResidualBlock | StreamBlock:
    """The block of an MTP head: like those of the trunk if it gets several streams. Its attention
    is layer 0 of a memory of its own."""
    make = ResidualBlock if config.trunk.n_handed == 1 else StreamBlock
    return make(parts.block, weights, config, 0)
