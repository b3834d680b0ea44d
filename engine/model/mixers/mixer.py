"""What every mixer is: called with normed rows and what is around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.model.memory import ModelMemory
from kernels.linear import PackedWeight, Rows


@dataclass(frozen=True, slots=True)
class RopeAndMemory:
    """What a block needs in addition to its input: cos, sin [B, T, n_rot/2] of the tokens, the
    memory, and the table of cosines and sines of all positions, [n_positions, n_rot]; None where no
    mixer looks at other positions than the tokens'. chosen: where the last indexer in this pass has
    its tokens look, bool [B, T, N], for layers after it that look there, too. tokens, positions:
    int64 [B, T]. of_blocks: the same in the rotation of layers that compress blocks of tokens, None
    without such layers.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    memory: ModelMemory
    table: torch.Tensor | None = None
    chosen: list[torch.Tensor] = field(default_factory=list)
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    of_blocks: RopeAndMemory | None = None

    @property
    def invariant(self) -> bool:
        """Whether a token's result must have the same bits whatever the other tokens are."""
        return self.memory.batch_invariant


class Mixer(Protocol):
    """The token-mixing half of a block. reads: matrices that its input is multiplied with, for
    kernels.norm.rms_norm_rows."""

    reads: tuple[PackedWeight, ...]

    def __call__(
        self, x: Rows, around: RopeAndMemory, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape, added to a residual if there is one."""
