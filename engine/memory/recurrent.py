"""Recurrent memory: the delta-net state and the convolution window of every recurrent layer.

A snapshot policy decides how many past states are kept and what a rollback costs. The model calls
`conv` and `delta` and never sees a policy; the policy owns the states, so it also chooses which
variant of the kernel computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.memory.batch import UBatch


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of one layer's state: S [n_v_heads, d_state, d_state], window [d_conv - 1, conv_dim].

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    """

    layers: tuple[int, ...]
    n_v_heads: int
    d_state: int
    d_conv: int
    conv_dim: int
    grouped: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of one snapshot of one sequence, all layers, float32."""
        state = self.n_v_heads * self.d_state * self.d_state
        return 4 * len(self.layers) * (state + (self.d_conv - 1) * self.conv_dim)


@dataclass(frozen=True, slots=True)
class SlotState:
    """One snapshot slot as the trace shows it. age: tokens behind the newest state written."""

    slot: int
    state: str
    age: int | None


@dataclass(frozen=True, slots=True)
class RecurrentCheckpoint:
    """A copy of one sequence's live state. pos: its last position."""

    pos: int
    states: tuple[torch.Tensor, ...]
    windows: tuple[torch.Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.states, *self.windows))


class RecurrentMemory(ABC):
    """One interface for all snapshot policies; positions count tokens, -1 is empty."""

    n_rs_seq: int
    shape: RecurrentShape

    @abstractmethod
    def begin(self, ubatch: UBatch) -> None:
        """Choose the rows to read; a pending rollback is consumed here."""

    @abstractmethod
    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Causal convolution and silu of x [n_seqs, n_seq_tokens, conv_dim], window updated."""

    @abstractmethod
    def delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Gated delta rule (kernels.delta_rule) over this ubatch, states updated."""

    @abstractmethod
    def commit(self) -> None:
        """Move the positions after the forward pass that `begin` prepared."""

    @abstractmethod
    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Undo the tokens from p0 on. False changes nothing: the caller needs a checkpoint."""

    @abstractmethod
    def seq_pos_max(self, seq: int) -> int:
        """Last position of the logical state, -1 when empty."""

    @abstractmethod
    def valid_depth(self, seq: int) -> int:
        """Deepest rollback that is truthful now."""

    @abstractmethod
    def pending(self, seq: int) -> int:
        """Snapshot that the next ubatch will read (`rs_idx`)."""

    @abstractmethod
    def guaranteed_depth(self, n_last: int) -> int:
        """Depth that will be truthful after an ubatch of n_last tokens."""

    @abstractmethod
    def save(self, seq: int) -> RecurrentCheckpoint:
        """Copy the logical state, also while a rollback is pending."""

    @abstractmethod
    def restore(self, seq: int, checkpoint: RecurrentCheckpoint) -> None:
        """Put a copy back; whatever was pending or kept before is gone."""

    @abstractmethod
    def live(self, seq: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The logical states and windows, one per recurrent layer."""

    @abstractmethod
    def slots(self, seq: int) -> list[SlotState]:
        """Every snapshot slot of a sequence."""

    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes of storage held."""
