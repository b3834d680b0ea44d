"""The last tokens of a sequence as a recurrent state, for layers that look at n-grams."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.conv_window import InputWindow
from engine.model.recurrence import RowNumbers
from kernels.recurrence.conv import causal_conv_slots
from kernels.rows import take_rows
from kernels.rows.ngrams import recent_tokens


class TokenInputs(NamedTuple):
    """x: tokens int64 [B, T]."""

    x: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> TokenInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        return TokenInputs(self.x[rows, tokens])


class TokenWindow(InputWindow[TokenInputs]):
    """The last n_gram - 1 tokens, oldest first.

    Advancing gives int64 [B, T, n_gram], each token and those before it, newest first; -1 before
    the beginning of the sequence.

    A row is a token plus one, in float32 as every state: exact below 2^24, and 0, with which
    sequences begin, is none.
    """

    is_exact = True

    def __init__(self, n_gram: int) -> None:
        # the convolution that keeps windows in rows of a pool; what it computes is the newest row
        self._newest = torch.tensor([[*[0.0] * (n_gram - 1), 1.0]])
        super().__init__(n_gram - 1, 1)

    def rows(self, inputs: TokenInputs) -> torch.Tensor:
        return (inputs.x + 1).to(torch.float32)[..., None]

    def outputs(
        self, inputs: TokenInputs, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return recent_tokens(inputs.x, window)

    def log(
        self, inputs: TokenInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        context, history = recent_tokens(inputs.x, start)
        return context, (history[:, self.shape[0] :],)

    def by_index(self, inputs: TokenInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        context, history = recent_tokens(inputs.x, take_rows(pool, rows.read))
        new, taps = history[:, self.shape[0] :], self._newest.to(pool.device)
        causal_conv_slots(new, taps, pool, rows.read, rows.in_order, activate=False)
        return context
