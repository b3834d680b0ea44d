"""What a model asks of the memory that holds attention cells and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from engine.batch import UBatch


class AttentionView(Protocol):
    """Cells of a ubatch's sequences: k, v [B, H_kv, N, hd] f32; mask bool [B, T, N]."""

    @property
    def k(self) -> torch.Tensor: ...
    @property
    def v(self) -> torch.Tensor: ...
    @property
    def mask(self) -> torch.Tensor: ...


class AttentionMemory(Protocol):
    """Keys and values by trunk layer index."""

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> AttentionView:
        """Store k (roped) and v [B, T, H_kv, hd]; return everything these tokens may see."""


class RecurrentMemory(Protocol):
    """Convolution windows and delta-rule states by trunk layer index, advanced in place."""

    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """silu of the causal convolution of x [B, T, C] with weight [C, K]."""

    def delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Gated delta rule; q, k [B, T, H_k, d], v [B, T, H_v, d], g and beta [B, T, H_v]."""


class Memory(Protocol):
    """Both parts, and the frame of one forward pass: begin, layer calls, commit."""

    @property
    def attention(self) -> AttentionMemory: ...
    @property
    def recurrent(self) -> RecurrentMemory | None: ...
    @property
    def batch_invariant(self) -> bool:
        """Whether a token's bits must not depend on the tokens and sequences decoded with it."""

    def begin(self, ubatch: UBatch) -> None:
        """Get ready for the tokens of `ubatch`."""

    def run(
        self,
        key: Hashable,
        arguments: tuple[torch.Tensor, ...],
        compute: Callable[..., tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """compute(*arguments): all layer calls of this pass, or a recording of an earlier pass
        like it (engine.graphs). key: what else the computation depends on."""

    def commit(self) -> None:
        """All layers have run; the tokens are part of their sequences now."""
