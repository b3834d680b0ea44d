"""The state of a short causal convolution: the last rows of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import Recurrence, RowNumbers
from kernels.conv import causal_conv, causal_conv_slots, fold_window


class ConvInputs(NamedTuple):
    """x: rows to convolve [B, T, C]. weight: taps [C, K]. bias: [C], if there is one."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def part(self, rows: slice, tokens: slice) -> ConvInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        return ConvInputs(self.x[rows, tokens], self.weight, self.bias)


class ConvWindow(Recurrence[ConvInputs]):
    """Window [d_conv - 1, n_channels], oldest row first; a token's log entry is its row.

    Advancing gives silu of the convolution, or the convolution itself unless `activate`, [B, T, C].
    """

    is_window = True

    def __init__(self, d_conv: int, n_channels: int, *, activate: bool = True) -> None:
        self._width, self._activate = d_conv - 1, activate
        super().__init__((self._width, n_channels), [(n_channels,)])

    def into(
        self,
        inputs: ConvInputs,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        y, history = self._convolve(inputs, start, invariant=invariant)
        n = inputs.x.shape[1]
        for back, slot in enumerate(slots):
            slot.copy_(history[:, n - back : n - back + self._width])
        return y

    def log(
        self, inputs: ConvInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y, _ = self._convolve(inputs, start, invariant=invariant)
        return y, (inputs.x,)

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        (columns,), width = entries, self._width
        if isinstance(n_tokens, int) and n_tokens >= width:
            window = columns[:, n_tokens - width : n_tokens]
        elif isinstance(n_tokens, int):
            window = torch.cat((start[:, n_tokens:], columns[:, :n_tokens]), 1)
        else:
            return fold_window(
                start, columns, n_tokens, torch.empty_like(start) if out is None else out
            )
        return window if out is None else out.copy_(window)

    def in_rows(
        self,
        inputs: ConvInputs,
        pool: torch.Tensor,
        rows: Sequence[torch.Tensor],
        read: Sequence[int | None],
        write: Sequence[Sequence[int]],
        in_order: torch.Tensor,
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        starts = [torch.zeros_like(rows[0]) if i is None else rows[i] for i in read]
        start = starts[0] if len(starts) == 1 else torch.cat(starts)
        y, history = self._convolve(inputs, start, invariant=invariant)
        after_each = history.unfold(1, self._width, 1).transpose(2, 3)
        pool[in_order] = after_each[:, -in_order.shape[1] :]
        return y

    def by_index(self, inputs: ConvInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        x, weight, bias = inputs
        return causal_conv_slots(
            x, weight, pool, rows.read, rows.in_order, bias, activate=self._activate
        )

    def _convolve(
        self, inputs: ConvInputs, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, bias = inputs
        return causal_conv(x, weight, window, bias, activate=self._activate, invariant=invariant)
