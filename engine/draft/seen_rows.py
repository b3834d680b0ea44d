"""Rows that the target computed, remembered to see whether a drafter was given others."""

from __future__ import annotations

import math

import torch

N_MARKS = 4
"""Numbers by which a row is known again; rows are only copied, so they stay equal."""


class SeenRows:
    """Marks of rows by sequence and position. n_before: positions before the first token, whose
    marks are zeros. Rows come to a drafter another way, through acceptance and `observe`: a row of
    a rejected token shows."""

    def __init__(self, n_before: int, device: torch.device) -> None:
        self._n_before, self._device = n_before, device
        self._marks: dict[int, torch.Tensor] = {}

    def note(self, seq: int, pos0: int, rows: torch.Tensor) -> None:
        """The target has computed rows [n, at least N_MARKS] of the tokens from pos0 on."""
        first, n = pos0 + self._n_before, len(rows)
        marks = self._marks.get(seq)
        if marks is None:
            marks = torch.zeros(self._n_before, N_MARKS, device=self._device)
        if (lack := first + n - len(marks)) > 0:
            marks = torch.cat((marks, marks.new_full((max(lack, len(marks)), N_MARKS), math.nan)))
        self._marks[seq] = marks
        marks[first : first + n] = rows[:, :N_MARKS]

    def __bool__(self) -> bool:
        return bool(self._marks)

    def n_wrong(self, seq: int, first: int, marks: torch.Tensor) -> torch.Tensor:
        """How many of the marks [n, N_MARKS] are not those at these positions, those before the
        first token included: int64; 0 for a sequence that was not watched."""
        if seq not in self._marks:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        return (marks != self._marks[seq][first : first + len(marks)]).any(1).sum()

    def forget(self, seq: int) -> None:
        """Drop a sequence."""
        self._marks.pop(seq, None)
