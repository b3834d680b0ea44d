"""What all models share: the block and the output head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, make_feed_forward
from engine.model.memory import Mixer, RopeAndMemory
from engine.model.mixers import make_mixer
from engine.model.parts import BlockParts
from engine.model.weights import Projection, Weights
from kernels.norm import layer_norm, rms_norm, rms_norm_rows
from kernels.pointwise import add, multiply
from kernels.rows import take_rows


class StepOutput(NamedTuple):
    """Result of one forward pass over a ubatch.

    logits: f32 [n_outputs, n_vocab]. hidden: f32 [n_seqs, n_seq_tokens, n_handed], what an MTP
    block reads of the tokens: rows after the final norm, or the raw streams of a trunk with several
    (engine.model.config.ModelConfig.n_handed).
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class ResidualBlock:
    """Pre-norm residual block: x += mixer(norm x), x += ffn(norm x), what is added times `scale`.

    Either of them may be missing. added_norms: of what the two add, where it is normed.
    """

    def __init__(
        self,
        mixer: Mixer | None,
        ffn: FeedForward | None,
        mixer_norm: torch.Tensor | None,
        ffn_norm: torch.Tensor | None,
        eps: float,
        scale: float = 1.0,
        added_norms: Sequence[torch.Tensor] = (),
    ) -> None:
        self._mixer = mixer
        self._ffn = ffn
        self._mixer_norm = mixer_norm
        self._ffn_norm = ffn_norm
        self._eps = eps
        self._added = added_norms
        norm = ffn_norm if mixer_norm is None else mixer_norm
        self._scale = None if norm is None or scale == 1.0 else norm.new_full(norm.shape, scale)
        self._changes = bool(added_norms) or self._scale is not None

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], not normed -> the same shape."""
        if self._mixer is not None and self._mixer_norm is not None:
            normed = rms_norm_rows(x, self._mixer_norm, self._eps, self._mixer.reads)
            y = self._mixer(normed, around, None if self._changes else x)
            x = add(x, self._scaled(y, 0)) if self._changes else y
        if self._ffn is not None and self._ffn_norm is not None:
            normed = rms_norm_rows(x, self._ffn_norm, self._eps, self._ffn.reads)
            residual = None if self._changes else x
            y = self._ffn(normed, invariant=around.invariant, residual=residual)
            x = add(x, self._scaled(y, 1)) if self._changes else y
        return x

    def _scaled(self, y: torch.Tensor, half: int) -> torch.Tensor:
        if self._added:
            y = rms_norm(y, self._added[half], self._eps)
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
        [weights.keep(name) for name in parts.added_norms],
    )


StreamReader = Callable[..., torch.Tensor]
"""What reads one row out of the streams of a token: streams [B, T, n_streams, n_embd], invariant=…
-> [B, T, n_embd]."""


class OutputHead:
    """Final norm, if there is one, and the projection to the vocabulary. Logits are divided by
    `scale`. centred: the norm subtracts the mean first. reader: what reads the row that is normed
    out of several streams, which are then the hidden rows; None where the trunk ends in one row.
    """

    def __init__(
        self,
        norm: torch.Tensor | None,
        projection: Projection,
        n_vocab: int,
        eps: float,
        scale: float = 1.0,
        *,
        centred: bool = False,
        reader: StreamReader | None = None,
    ) -> None:
        self.norm, self.reader = norm, reader
        self._normed = layer_norm if centred else rms_norm
        self.projection = projection
        self._n_vocab = n_vocab
        self.eps = eps
        self._factors = None
        if scale != 1.0:
            device = None if norm is None else norm.device
            self._factors = torch.full((n_vocab,), 1.0 / scale, device=device)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [B, T, n_handed] (StepOutput) of x [B, T, n_embd], or of streams
        [B, T, n_streams, n_embd]."""
        return self._after_norm(x) if self.reader is None else x.flatten(2)

    def logits(self, hidden: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """Logits [n, n_vocab] of hidden rows [n, n_handed]."""
        return self.scaled(
            self.projection(self.read(hidden, invariant=invariant), invariant=invariant)
        )

    def read(self, hidden: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """What the projection reads [n, n_embd] of hidden rows [n, n_handed]."""
        if self.reader is None:
            return hidden
        streams = hidden.view(1, len(hidden), -1, self.projection.packed.shape[1])
        return self._after_norm(self.reader(streams, invariant=invariant))[0]

    def _after_norm(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.norm is None else self._normed(x, self.norm, self.eps)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Results of the projection, [n, any of the vocabulary], as logits."""
        if self._factors is None:
            return logits
        return multiply(logits, self._factors[: logits.shape[-1]])

    def __call__(self, x: torch.Tensor, outputs: torch.Tensor, *, invariant: bool) -> StepOutput:
        """x as in `hidden`; logits only of the flat rows int64 [n] in `outputs`."""
        hidden = self.hidden(x)
        if outputs.numel() == 0:
            return StepOutput(hidden.new_empty(0, self._n_vocab), hidden)
        rows = take_rows(hidden.flatten(0, 1), outputs)
        return StepOutput(self.logits(rows, invariant=invariant), hidden)
