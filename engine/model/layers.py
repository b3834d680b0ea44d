"""Shared layers: the residual block, the output head, rope tables, and the rows that a target
passes to drafters: hidden rows, and taps into its trunk.

Tap i is the residual stream that enters block i: the embedding for i = 0, else the output of block
i - 1, before any norm. Tap n_layer is the row after the final norm, which the MTP head reads. With
several streams (deepseek4) every tap is their mean, the last one before the head mixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.machine.device import CPU
from engine.model.config import ModelConfig
from engine.model.feed_forward import make_feed_forward
from engine.model.memory import RopeAndMemory
from engine.model.mixers import make_mixer
from engine.model.parts import BlockParts
from engine.model.rope import RopeConfig
from engine.model.weights import Projection, Weights
from kernels.linear.block_parts import Norm, Residual, Rows
from kernels.norm import layer_norm, rms_norm, rms_norm_rows
from kernels.pointwise import add, multiply
from kernels.rope import rope_table
from kernels.rows import join, take_rows


class StepOutput(NamedTuple):
    """Result of one forward pass over a ubatch.

    logits: f32 [n_outputs, n_vocab]. hidden: f32 [n_seqs, n_seq_tokens, n_handed], the input of an
    MTP block: rows after the final norm, or the raw streams of a trunk with several
    (engine.model.config.ModelConfig.n_handed).
    """

    logits: Tensor
    hidden: Tensor


class ResidualBlock:
    """Pre-norm residual block: x += mixer(norm x), x += ffn(norm x), each term times `scale`.

    One of them may be missing; their outputs may be normed. norm: the first norm of the block.
    layer: index of its states and cells.
    """

    def __init__(
        self, parts: BlockParts, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        mixer = self._mixer = make_mixer(parts.mixers, weights, config, layer)
        ffn = make_feed_forward(parts.ffn, weights, config.eps) if parts.ffn else None
        mixer_norm = weights.keep(parts.mixer_norm) if mixer and parts.mixer_norm else None
        ffn_norm = weights.keep(parts.ffn_norm) if ffn and parts.ffn_norm else None
        eps, scale = config.eps, parts.residual_scale
        self._ffn, self._eps = ffn, eps
        self.norm: Norm
        self._ffn_norm: Norm | None = None
        if ffn is not None and ffn_norm is not None:
            self.norm = self._ffn_norm = ffn_norm, eps, ffn.reads
        if mixer is not None and mixer_norm is not None:
            self.norm = mixer_norm, eps, mixer.reads
        self._added = [weights.keep(name) for name in parts.added_norms]
        norm = ffn_norm if mixer_norm is None else mixer_norm
        self._scale = None if norm is None or scale == 1.0 else norm.new_full(norm.shape, scale)
        self._changes = bool(self._added) or self._scale is not None

    def __call__(self, x: Tensor, around: RopeAndMemory) -> Tensor:
        """x [B, T, n_embd], not normed -> the same shape."""
        return self.advance(x, rms_norm_rows(x, *self.norm), around)[0]

    def advance(
        self, x: Tensor, normed: Rows, around: RopeAndMemory, then: Norm | None = None
    ) -> tuple[Tensor, Rows]:
        """Input x [B, T, n_embd] and x after `self.norm`; returns the block's output, and that
        after the next norm."""
        if self._mixer is not None:
            residual = Residual(x, self._ffn_norm or then)
            y = self._mixer(normed, around, None if self._changes else residual)
            x = self._sum(x, y, 0)
            normed = _after_norm(residual, x)
        if self._ffn is not None:
            residual = Residual(x, then)
            given = None if self._changes else residual
            y = self._ffn(normed, invariant=around.invariant, residual=given)
            x = self._sum(x, y, 1)
            normed = _after_norm(residual, x)
        return x, normed

    def _sum(self, x: Tensor, y: Tensor, half: int) -> Tensor:
        """Add the output y of a half to x; y already includes x unless the block changes it
        first."""
        if self._added:
            y = rms_norm(y, self._added[half], self._eps)
        if self._scale is not None:
            y = multiply(y, self._scale)
        return add(x, y) if self._changes else y


def _after_norm(residual: Residual, x: Tensor) -> Rows:
    """The sum x after the norm; x itself if there is none."""
    if residual.normed is not None:
        return residual.normed
    return x if residual.norm is None else rms_norm_rows(x, *residual.norm)


StreamReader = Callable[..., Tensor]
"""Reads one row from the streams of a token: streams [B, T, n_streams, n_embd], invariant=… -> [B,
T, n_embd]."""


class OutputHead:
    """Final norm, if any, and the projection to the vocabulary. Logits are divided by `scale`.
    centred: the norm subtracts the mean first. reader: combines several streams, which are then the
    hidden rows, to the row that is normed; None if the trunk ends in one row."""

    def __init__(
        self,
        norm: Tensor | None,
        projection: Projection,
        n_vocab: int,
        eps: float,
        scale: float = 1.0,
        *,
        centred: bool = False,
        reader: StreamReader | None = None,
    ) -> None:
        self.norm, self.reader = norm, reader
        self._centred = centred
        self.projection = projection
        self._n_vocab = n_vocab
        self.eps = eps
        self._factors = None
        if scale != 1.0:
            device = None if norm is None else norm.device
            self._factors = torch.full((n_vocab,), 1.0 / scale, device=device)

    def hidden(self, x: Tensor) -> Tensor:
        """Rows [B, T, n_handed] (StepOutput) of x [B, T, n_embd], or of streams
        [B, T, n_streams, n_embd]."""
        return self._after_norm(x) if self.reader is None else x.flatten(2)

    def logits(self, hidden: Tensor, *, invariant: bool) -> Tensor:
        """Logits [n, n_vocab] of hidden rows [n, n_handed]."""
        return self.scaled(
            self.projection(self.read(hidden, invariant=invariant), invariant=invariant)
        )

    def read(self, hidden: Tensor, *, invariant: bool) -> Tensor:
        """Input rows of the projection [n, n_embd] from hidden rows [n, n_handed]."""
        if self.reader is None:
            return hidden
        streams = hidden.view(1, len(hidden), -1, self.projection.packed.shape[1])
        return self._after_norm(self.reader(streams, invariant=invariant))[0]

    def _after_norm(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        return (layer_norm if self._centred else rms_norm)(x, self.norm, self.eps)

    def scaled(self, logits: Tensor) -> Tensor:
        """Scale outputs of the projection, [n, any part of the vocabulary], to logits."""
        if self._factors is None:
            return logits
        return multiply(logits, self._factors[: logits.shape[-1]])

    def __call__(self, x: Tensor, outputs: Tensor, *, invariant: bool) -> StepOutput:
        """x as in `hidden`; logits only of the flat rows int64 [n] in `outputs`."""
        hidden = self.hidden(x)
        if outputs.numel() == 0:
            return StepOutput(hidden.new_empty(0, self._n_vocab), hidden)
        rows = take_rows(hidden.flatten(0, 1), outputs)
        return StepOutput(self.logits(rows, invariant=invariant), hidden)


_LEAST = 4096
"""Initial table size in positions: recorded passes are bound to it, so it should rarely grow."""


class RopeTables:
    """Cosines and sines of all positions so far, doubled as positions grow; without columns if
    nothing rotates."""

    def __init__(
        self,
        config: RopeConfig | None,
        device: torch.device = CPU,
        place: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """place: maps positions int64 [n] to the ones used."""
        self.config, self.device, self._place = config, device, place
        self._n_rot = config.n_rot if config else 0
        self._scale = config.magnitude if config else 1.0
        inverse = config.inverse_frequencies() if config else []
        self._inv_freq = torch.tensor(inverse, dtype=torch.float64)
        self.table = torch.empty(0, self._n_rot)
        """Of every position so far cosines, then sines, f32 [n_positions, n_rot]."""

    def reach(self, highest: int) -> int:
        """Extend the tables to the position `highest`; returns their length."""
        if highest >= self.table.shape[0]:
            self._extend(highest)
        return self.table.shape[0]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [B, T] on the device, within the tables -> cos, sin f32 [B, T,
        n_rot/2]."""
        cos, sin = take_rows(self.table, positions).chunk(2, -1)
        return cos, sin

    def _extend(self, highest: int) -> None:
        size = max(_LEAST, 1 << (highest + 1).bit_length())
        places = torch.arange(size)
        if self._place is not None:
            places = self._place(places)
        cos, sin = rope_table(places, self._n_rot, self._inv_freq, self._scale)
        self.table = torch.cat((cos, sin), -1).to(self.device)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows that the target computed for some tokens, other than logits.

    hidden: float32 [..., n_handed], after the final norm, or the raw streams of a trunk with
    several. taps: rows [..., n_embd] of the requested layers.
    """

    hidden: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.hidden.shape[0]  # four times as fast as len()

    def __getitem__(self, which: int | slice) -> TargetRows:
        """Some of the rows, by their first dimension."""
        return TargetRows(self.hidden[which], {i: rows[which] for i, rows in self.taps.items()})

    def first(self, n: int) -> TargetRows:
        """The first n rows."""
        return self if n == len(self) else self[:n]

    def side_by_side(self, layers: Sequence[int]) -> Tensor:
        """The taps of these layers in this order: float32 [..., len(layers) * n_embd]."""
        return join([self.taps[i] for i in layers])


def join_rows(parts: Sequence[TargetRows]) -> TargetRows:
    """Concatenate parts [n_i, n_embd] with the same taps."""
    if len(parts) == 1:
        return parts[0]
    layers = parts[0].taps
    return TargetRows(
        torch.cat([part.hidden for part in parts]),
        {i: torch.cat([part.taps[i] for part in parts]) for i in layers},
    )


class TapCollector:
    """Collects the requested rows while the trunk computes."""

    __slots__ = ("_rows",)

    def __init__(self, layers: Sequence[int]) -> None:
        self._rows: dict[int, Tensor | None] = dict.fromkeys(layers)

    def wants(self, layer: int) -> bool:
        """Whether the row that enters this layer is asked for."""
        return layer in self._rows

    def enters(self, layer: int, x: Tensor) -> None:
        """x [B, T, n_embd] is what `layer` takes."""
        if layer in self._rows:
            self._rows[layer] = x

    def found(self) -> tuple[Tensor, ...]:
        """In the order in which the layers were asked for."""
        rows = tuple(x for x in self._rows.values() if x is not None)
        assert len(rows) == len(self._rows), "a layer that the trunk does not have"
        return rows
