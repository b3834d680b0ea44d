"""The state of the gated delta rule, with one gate per head or one per key channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import Recurrence, RowNumbers
from kernels.linear.rounding import rounded
from kernels.recurrence.delta_rule import (
    DeltaLog,
    fold,
    gated_delta_into,
    gated_delta_log,
    gated_delta_slots,
)


class DeltaInputs(NamedTuple):
    """q, k: [B, T, H_k, d]. v: [B, T, H_v, d]. g: log decay [B, T, H_v], or [B, T, H_v, d] for one
    gate per key channel. beta: [B, T, H_v]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> DeltaInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        return DeltaInputs(*(x[rows, tokens] for x in self))

    def with_gates(self, type: str) -> DeltaInputs:
        """See engine.model.stored_state.GatedInputs."""
        return self._replace(g=rounded(self.g, type), beta=rounded(self.beta, type))


class DeltaState(Recurrence[DeltaInputs]):
    """S [n_v_heads, d, d] of kernels.recurrence.delta_rule; advancing gives o [B, T, n_v_heads, d].

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    channels: one gate per key channel (Kimi Delta Attention, arXiv 2510.26692), else one per head.
    A token's log entry is (k, u, g), and folding is one product.
    """

    def __init__(
        self, n_k_heads: int, n_v_heads: int, d: int, *, grouped: bool, channels: bool = False
    ) -> None:
        self.n_k_heads, self.n_v_heads, self.d, self.grouped = n_k_heads, n_v_heads, d, grouped
        gates = (n_v_heads, d) if channels else (n_v_heads,)
        super().__init__((n_v_heads, d, d), [(n_k_heads, d), (n_v_heads, d), gates])

    def into(
        self,
        inputs: DeltaInputs,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        return gated_delta_into(
            *inputs, start, grouped=self.grouped, slots=slots, invariant=invariant
        )

    def log(
        self, inputs: DeltaInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return gated_delta_log(*inputs, start, grouped=self.grouped, invariant=invariant)

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        log = DeltaLog(*entries)
        return fold(start, log, n_tokens, grouped=self.grouped, out=out, invariant=invariant)

    def by_index(self, inputs: DeltaInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        return gated_delta_slots(*inputs, pool, rows.read, rows.write, grouped=self.grouped)
