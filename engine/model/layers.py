"""What all models share: rope tables, feed-forward parts (dense, mixture of experts), the block,
the output head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.device import CPU
from engine.model.config import MoeConfig
from engine.model.memory import ModelMemory
from engine.model.rope import RopeConfig
from engine.model.weights import Projection, Weights
from kernels.gates import output_gate
from kernels.moe import experts, route
from kernels.norm import rms_norm
from kernels.residual import add
from kernels.rope import rope_table
from kernels.rows import take_rows
from kernels.swiglu import swiglu


class StepOutput(NamedTuple):
    """Result of one forward pass over a ubatch.

    logits: f32 [n_outputs, n_vocab]. hidden: f32 [n_seqs, n_seq_tokens, n_embd], after the
    final norm.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class RopeAndMemory:
    """What a block needs besides its input: cos, sin [B, T, n_rot/2] and the memory."""

    cos: torch.Tensor
    sin: torch.Tensor
    memory: ModelMemory

    @property
    def invariant(self) -> bool:
        """Whether a token's result must have the same bits whatever tokens stand beside it."""
        return self.memory.batch_invariant


class Mixer(Protocol):
    """The token-mixing half of a block: full attention or Gated DeltaNet."""

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape."""


class FeedForward(Protocol):
    """The other half of a block: dense or mixture of experts."""

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape."""


class RopeTables:
    """Cosines and sines of all positions so far, extended by doubling as positions grow."""

    def __init__(self, config: RopeConfig, device: torch.device = CPU) -> None:
        self._device = device
        self._n_rot = config.n_rot
        self._scale = config.magnitude
        self._inv_freq = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)
        self._table = torch.empty(0, config.n_rot)

    def reach(self, highest: int) -> int:
        """Make the tables reach the position `highest`; how many positions they have."""
        if highest >= self._table.shape[0]:
            self._extend(highest)
        return self._table.shape[0]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [B, T], within reach, on the device -> cos, sin f32 [B, T, n_rot/2]."""
        cos, sin = take_rows(self._table, positions).chunk(2, -1)
        return cos, sin

    def _extend(self, highest: int) -> None:
        size = max(256, 1 << (highest + 1).bit_length())
        cos, sin = rope_table(torch.arange(size), self._n_rot, self._inv_freq, self._scale)
        self._table = torch.cat((cos, sin), -1).to(self._device)


class DenseFeedForward:
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, weights: Weights, width: int, suffix: str = "") -> None:
        self._sizes = [width, width]
        self._gate_up = weights.project(f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight")
        self._down = weights.project(f"ffn_down{suffix}.weight")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [..., n_embd] -> the same shape."""
        gate, up = self._gate_up(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        return self._down(swiglu(gate, up, invariant=invariant), invariant=invariant)


class ResidualBlock:
    """Pre-norm residual block: x += mixer(norm x), x += ffn(norm x)."""

    def __init__(
        self,
        mixer: Mixer,
        ffn: FeedForward,
        mixer_norm: torch.Tensor,
        ffn_norm: torch.Tensor,
        eps: float,
    ) -> None:
        self._mixer = mixer
        self._ffn = ffn
        self._mixer_norm = mixer_norm
        self._ffn_norm = ffn_norm
        self._eps = eps

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], not normed -> the same shape."""
        x = add(x, self._mixer(rms_norm(x, self._mixer_norm, self._eps), around))
        opened = self._ffn(rms_norm(x, self._ffn_norm, self._eps), invariant=around.invariant)
        return add(x, opened)


class OutputHead:
    """Final norm and the projection to the vocabulary."""

    def __init__(
        self, norm: torch.Tensor, projection: Projection, n_vocab: int, eps: float
    ) -> None:
        self.norm = norm
        self.projection = projection
        self._n_vocab = n_vocab
        self._eps = eps

    def __call__(self, x: torch.Tensor, outputs: torch.Tensor, *, invariant: bool) -> StepOutput:
        """x [B, T, n_embd], not normed; logits only of the flat rows int64 [n] in `outputs`."""
        hidden = rms_norm(x, self.norm, self._eps)
        if outputs.numel() == 0:
            return StepOutput(hidden.new_empty(0, self._n_vocab), hidden)
        rows = take_rows(hidden.flatten(0, 1), outputs)
        return StepOutput(self.projection(rows, invariant=invariant), hidden)


class MixtureOfExperts:
    """Sum of the routed experts, plus sigmoid(shared gate) times the shared expert.

    Router and shared gate are one matrix and stay f32 in every compute mode: rounding there
    flips expert choices.
    """

    def __init__(self, weights: Weights, moe: MoeConfig) -> None:
        self._n_used = moe.n_used
        self._router = weights.stack(
            [weights.numbers("ffn_gate_inp.weight"), weights.numbers("ffn_gate_inp_shexp.weight")],
            compute="f32",
        )
        self._router_sizes = [moe.n_experts, 1]
        self._experts = weights.experts()
        self._shared = DenseFeedForward(weights, moe.n_ff_shared, "_shexp")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [B, T, n_embd] -> the same shape."""
        rows = x.flatten(0, 1)
        routing = self._router(rows, invariant=invariant)
        logits, shared_gate = routing.split(self._router_sizes, -1)
        weights, ids = route(logits, self._n_used)
        routed = experts(rows, weights, ids, self._experts, invariant=invariant)
        shared = output_gate(
            self._shared(rows, invariant=invariant), shared_gate, invariant=invariant
        )
        return add(routed, shared).view_as(x)
