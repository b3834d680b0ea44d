"""Acceptance after every step of a run: over the last steps, and since its beginning."""

from __future__ import annotations

import numpy as np

from app.trace_models.run_rows import GrowingArray, RunRows
from engine.trace.step_sums import StepSums

WINDOW = 16
"""Steps that the windowed rate looks at."""


class StepCurves:
    """Grows with the rows of a run; `sums` has the counts behind the other figures.

    rounds: of each step, int64 [n]. windowed, lifetime: accepted / drafted, float64 [n].
    """

    def __init__(self) -> None:
        self.sums = StepSums()
        self._rounds = GrowingArray(np.int64)
        self._drafted, self._accepted = GrowingArray(np.int64), GrowingArray(np.int64)

    def add(self, rows: RunRows, start: int, stop: int) -> None:
        """Read rows start .. stop of the run's `rounds` table."""
        steps = rows.add_to(self.sums, start, stop)
        drafted = rows.column("num_draft_tokens", start, stop)
        accepted = rows.column("num_accepted_draft_tokens", start, stop)
        self._rounds.add(rows.rounds.values[start:stop][steps])
        for sums, values in ((self._drafted, drafted), (self._accepted, accepted)):
            before = int(sums.values[-1]) if len(sums) else 0
            sums.add(before + np.cumsum(np.maximum(values[steps], 0)))

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def rounds(self) -> np.ndarray:
        return self._rounds.values

    def between(self, first_round: int, stop_round: int) -> tuple[int, int]:
        """Start and stop, as indices of steps, of rounds first_round .. stop_round - 1."""
        start, stop = np.searchsorted(self.rounds, (first_round, stop_round))
        return int(start), int(stop)

    def windowed(self, start: int, stop: int) -> np.ndarray:
        """The rate over the last WINDOW steps, of steps start..stop."""
        return self._over(self._accepted, start, stop) / self._over(self._drafted, start, stop)

    def lifetime(self, start: int, stop: int) -> np.ndarray:
        """The rate over all steps so far, of steps start..stop."""
        rates: np.ndarray = self._accepted.values[start:stop] / self._drafted.values[start:stop]
        return rates

    def _over(self, sums: GrowingArray, start: int, stop: int) -> np.ndarray:
        before = np.arange(start, stop) - WINDOW
        base = np.where(before < 0, 0, sums.values[np.maximum(before, 0)])
        counts: np.ndarray = sums.values[start:stop] - base
        return counts
