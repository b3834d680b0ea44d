"""Where a lane is wrong: its divergence from the reference against what the noise explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.findings.run_rows import POLICY, RunRows

_LEAST_STATE = 1e-4
"""Relative error of a state that rounding never reaches in float32."""
_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class LaneErrors:
    """Per row of `divergence`, bool [n]: logits beyond the bound, wrong S, wrong window. The
    last two are False where states were not compared. limit: relative error of a state that
    noise explains."""

    run: RunRows
    logits_are_wrong: np.ndarray
    state_is_wrong: np.ndarray
    conv_is_wrong: np.ndarray
    limit: float

    @classmethod
    def of(cls, run: RunRows) -> LaneErrors | None:
        """None for a run that is no policy lane, or has no noise lane to be measured by.

        The bound on states is that of the logits as an amplitude, with some room: both are made
        of the same activations, and states collect their errors. Wrong ones are off by about 1.
        """
        bound = run.bound
        if run.kind != POLICY or bound is None:
            return None
        rows = run.divergence
        limit = max(_LEAST_STATE, _MARGIN * float(np.sqrt(bound)))
        state, conv = (rows[name] > limit for name in ("state_error", "conv_error"))
        return cls(run, ~(rows["nmse"] <= bound), state, conv, limit)

    def first_wrong(self, seq: int) -> int | None:
        """The first row of a sequence in which anything is wrong."""
        wrong = self.logits_are_wrong | self.state_is_wrong | self.conv_is_wrong
        rows = np.flatnonzero(wrong & (self.run.divergence["seq_id"] == seq))
        return int(rows[0]) if rows.size else None
