"""The last tokens of a sequence as a recurrent state, for layers that look at n-grams."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.conv_window import InputWindow


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

    def __init__(self, n_gram: int) -> None:
        self._n_gram = n_gram
        super().__init__(n_gram - 1, 1)

    def rows(self, inputs: TokenInputs) -> torch.Tensor:
        return (inputs.x + 1).to(torch.float32)[..., None]

    def outputs(
        self, inputs: TokenInputs, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        history = torch.cat((window, self.rows(inputs)), 1)
        newest_last = history[..., 0].unfold(1, self._n_gram, 1)
        return newest_last.flip(-1).to(torch.int64) - 1, history
