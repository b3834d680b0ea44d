"""What all models share: the block and the output head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, make_feed_forward
from engine.model.mixers import make_mixer
from engine.model.mixers.mixer import Mixer, RopeAndMemory
from engine.model.parts import BlockParts
from engine.model.weights import Projection, Weights
from kernels.norm import layer_norm, rms_norm
from kernels.pointwise import add, multiply
from kernels.rows import take_rows


class StepOutput(NamedTuple):
    """Result of one forward pass over a ubatch.

    logits: f32 [n_outputs, n_vocab]. hidden: f32 [n_seqs, n_seq_tokens, n_embd], after the
    final norm.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class ResidualBlock:
    """Pre-norm residual block: x += mixer(norm x), x += ffn(norm x), what is added times `scale`.

    Either of them may be missing.
    """

    def __init__(
        self,
        mixer: Mixer | None,
        ffn: FeedForward | None,
        mixer_norm: torch.Tensor | None,
        ffn_norm: torch.Tensor | None,
        eps: float,
        scale: float = 1.0,
    ) -> None:
        self._mixer = mixer
        self._ffn = ffn
        self._mixer_norm = mixer_norm
        self._ffn_norm = ffn_norm
        self._eps = eps
        norm = ffn_norm if mixer_norm is None else mixer_norm
        self._scale = None if norm is None or scale == 1.0 else norm.new_full(norm.shape, scale)

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], not normed -> the same shape."""
        if self._mixer is not None and self._mixer_norm is not None:
            normed = rms_norm(x, self._mixer_norm, self._eps)
            x = add(x, self._scaled(self._mixer(normed, around)))
        if self._ffn is not None and self._ffn_norm is not None:
            normed = rms_norm(x, self._ffn_norm, self._eps)
            x = add(x, self._scaled(self._ffn(normed, invariant=around.invariant)))
        return x

    def _scaled(self, y: torch.Tensor) -> torch.Tensor:
        return y if self._scale is None else multiply(y, self._scale)


def make_block(
    parts: BlockParts, weights: Weights, config: ModelConfig, layer: int
) -> ResidualBlock:
    """A block of `parts`. layer: under which its mixers find their states and cells."""
    mixer = make_mixer(parts.mixers, weights, config, layer)
    ffn = make_feed_forward(parts.ffn, weights, config.eps) if parts.ffn else None
    return ResidualBlock(
        mixer,
        ffn,
        weights.keep(parts.mixer_norm) if mixer and parts.mixer_norm else None,
        weights.keep(parts.ffn_norm) if ffn and parts.ffn_norm else None,
        config.eps,
        parts.residual_scale,
    )


class OutputHead:
    """Final norm, if there is one, and the projection to the vocabulary. Logits are divided by
    `scale`. centred: the norm subtracts the mean first."""

    def __init__(
        self,
        norm: torch.Tensor | None,
        projection: Projection,
        n_vocab: int,
        eps: float,
        scale: float = 1.0,
        *,
        centred: bool = False,
    ) -> None:
        self.norm = norm
        self._normed = layer_norm if centred else rms_norm
        self.projection = projection
        self._n_vocab = n_vocab
        self.eps = eps
        self._factors = None
        if scale != 1.0:
            device = None if norm is None else norm.device
            self._factors = torch.full((n_vocab,), 1.0 / scale, device=device)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What the projection reads of x [..., n_embd]."""
        return x if self.norm is None else self._normed(x, self.norm, self.eps)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Results of the projection, [n, any of the vocabulary], as logits."""
        if self._factors is None:
            return logits
        return multiply(logits, self._factors[: logits.shape[-1]])

    def __call__(self, x: torch.Tensor, outputs: torch.Tensor, *, invariant: bool) -> StepOutput:
        """x [B, T, n_embd], not normed; logits only of the flat rows int64 [n] in `outputs`."""
        hidden = self.normed(x)
        if outputs.numel() == 0:
            return StepOutput(hidden.new_empty(0, self._n_vocab), hidden)
        rows = take_rows(hidden.flatten(0, 1), outputs)
        logits = self.scaled(self.projection(rows, invariant=invariant))
        return StepOutput(logits, hidden)
