"""What the speed of a run would have been with another n_max, from its trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.analysis.what_if.costs import RoundCosts
from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.rules import FIXED
from engine.analysis.what_if.simulation import simulate
from engine.analysis.what_if.surface import gain


@dataclass(frozen=True, slots=True)
class DraftLengthEstimate:
    """One n_max. expected_length: tokens per round. Times: milliseconds per round.

    rest_ms: sampling, checkpoint, rollback, restore, replay, and what no phase counts. Times and
    tokens_per_second are None where the run was not timed, the speed of plain decoding also where
    no pass of one token was.
    """

    n_max: int
    expected_length: float
    draft_ms: float | None
    verify_ms: float | None
    rest_ms: float | None
    tokens_per_second: float | None

    @property
    def step_ms(self) -> float | None:
        """Time of a round."""
        if self.draft_ms is None or self.verify_ms is None or self.rest_ms is None:
            return None
        return self.draft_ms + self.verify_ms + self.rest_ms


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimates for n_max 0 … K in order, K being the longest draft recorded.

    n_steps: rounds with a draft that they are made from. unmeasured_widths: verify widths that an
    estimate needs and no row had; their cost is taken from between the nearest that were measured.
    gain: of the best over the recorded, see engine.analysis.what_if.surface.
    """

    n_steps: int
    estimates: tuple[DraftLengthEstimate, ...]
    unmeasured_widths: tuple[int, ...]
    gain: tuple[float, float] | None = None

    @property
    def recorded(self) -> DraftLengthEstimate:
        """The n_max that the run had."""
        return self.estimates[-1]

    @property
    def best(self) -> DraftLengthEstimate | None:
        """The fastest; the smaller n_max where two are equal. None without times."""
        timed = [e for e in self.estimates if e.tokens_per_second is not None]
        return max(timed, key=lambda e: (e.tokens_per_second or 0.0, -e.n_max), default=None)

    @property
    def is_shown(self) -> bool:
        """Whether the best is the one that was recorded, or faster beyond the run's own spread."""
        best = self.best
        is_same = best is not None and best.n_max == self.recorded.n_max
        return is_same or (self.gain is not None and self.gain[0] > 1)


def what_if(rounds: RecordedRounds, *, is_whole: bool = True) -> WhatIf | None:
    """Estimates from the rounds of one run; None without a single draft. is_whole: the run has
    ended, so that a gain is worth its time."""
    if not rounds.n_drafts:
        return None
    costs = RoundCosts.measured(rounds)
    lengths = range(rounds.n_max + 1)
    played = simulate(rounds, costs, FIXED, [{"n_max": n_max} for n_max in lengths])
    per_round = [
        values.sum(1) / played.rounds.sum(1)
        for values in (played.draft_ms, played.verify_ms, played.rest_ms)
    ]
    expected, speeds = played.tokens_per_round(), played.tokens_per_second()
    estimates = []
    for i in lengths:
        if costs is None:
            estimates.append(DraftLengthEstimate(i, float(expected[i]), None, None, None, None))
            continue
        draft, verify, rest = (float(ms[i]) for ms in per_round)
        speed = float(speeds[i]) if i or costs.plain_is_timed else None
        estimates.append(DraftLengthEstimate(i, float(expected[i]), draft, verify, rest, speed))
    missing = costs.unmeasured(range(1, rounds.n_max + 2)) if costs else ()
    result = WhatIf(rounds.n_drafts, tuple(estimates), missing)
    timed = result.best is not None and result.best.n_max + 1 not in missing
    if not (is_whole and timed) or result.best == result.recorded:
        return result
    best, now = ({"n_max": one.n_max} for one in (result.best, result.recorded) if one)
    return replace(result, gain=gain(rounds, best, now))
