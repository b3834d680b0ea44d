"""The state of a Mamba-2 layer (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import Recurrence, RowNumbers
from kernels.linear.rounding import rounded
from kernels.recurrence.ssd import SsdLog, fold, ssd_into, ssd_log, ssd_slots


class SsdInputs(NamedTuple):
    """x: [B, T, H, P]. dt, g: step sizes and log decay, [B, T, H]. B, C: [B, T, G, N]. D: [H], of
    the layer."""

    x: torch.Tensor
    dt: torch.Tensor
    g: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> SsdInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        x, dt, g, B, C = (part[rows, tokens] for part in self[:5])
        return SsdInputs(x, dt, g, B, C, self.D)

    def with_gates(self, type: str) -> SsdInputs:
        """See engine.model.stored_state.GatedInputs."""
        return self._replace(dt=rounded(self.dt, type), g=rounded(self.g, type))


class SsdState(Recurrence[SsdInputs]):
    """S [n_heads, head_dim, d_state] of kernels.recurrence.ssd; advancing gives o [B, T, n_heads,
    head_dim].

    A token's log entry is (dt x, B, g), and folding is one product.
    """

    def __init__(self, n_heads: int, head_dim: int, n_groups: int, d_state: int) -> None:
        entry = [(n_heads, head_dim), (n_groups, d_state), (n_heads,)]
        super().__init__((n_heads, head_dim, d_state), entry)

    def into(
        self,
        inputs: SsdInputs,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        return ssd_into(*inputs, start, slots=slots, invariant=invariant)

    def log(
        self, inputs: SsdInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return ssd_log(*inputs, start, invariant=invariant)

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        return fold(start, SsdLog(*entries), n_tokens, out=out, invariant=invariant)

    def by_index(self, inputs: SsdInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        return ssd_slots(*inputs, pool, rows.read, rows.write)
