"""Speed over draft lengths: for each length, and for length and p_min."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.analysis.what_if.costs import RoundCosts
from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.rules import FIXED, FLOORS, RuleSpec, Setting
from engine.analysis.what_if.simulation import simulate


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


LEAST_GAIN = 1.005
"""Below it a gain would be written as none."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimates for n_max 0 … K in order, K being the longest draft recorded.

    n_steps: rounds with a draft that they are made from. unmeasured_widths: verify widths that an
    estimate needs and no row had; their cost is taken from between the nearest that were measured.
    gain: of the best over the recorded, see `gain`.
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
        return is_same or (self.gain is not None and self.gain[0] >= LEAST_GAIN)


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


@dataclass(frozen=True, slots=True)
class Surface:
    """A rule's outcome for every pair of n_max [a] and p_min [b]: arrays are float [a, b].

    tokens_per_second: NaN where the run was not timed. acceptance: NaN where nothing is drafted.
    draft_ms, verify_ms, rest_ms: per round. speed_up: against plain decoding; NaN where passes of
    one token, or those that a setting needs, were not timed in this run. unmeasured_widths: verify
    widths that are asked for and no recorded pass had.
    """

    rule: str
    n_max: np.ndarray
    p_min: np.ndarray
    tokens_per_second: np.ndarray
    acceptance: np.ndarray
    tokens_per_round: np.ndarray
    draft_ms: np.ndarray
    verify_ms: np.ndarray
    rest_ms: np.ndarray
    speed_up: np.ndarray
    unmeasured_widths: tuple[int, ...]

    @property
    def best(self) -> tuple[int, int] | None:
        """Row and column of the fastest; of equal ones the shortest draft and the lowest floor.
        None without times."""
        if not np.isfinite(self.tokens_per_second).any():
            return None
        row, column = np.unravel_index(
            int(np.nanargmax(self.tokens_per_second)), self.tokens_per_second.shape
        )
        return int(row), int(column)


def surface(
    rounds: RecordedRounds,
    costs: RoundCosts | None = None,
    *,
    n_max: Sequence[int] | None = None,
    p_min: Sequence[float] | None = None,
    rule: RuleSpec = FIXED,
) -> Surface | None:
    """Play a run under every pair; None where it has no draft.

    `surface(RecordedRounds.of(run))` is all that a view needs. costs: None = those of the run
    itself. n_max: 1 … the longest recorded. p_min: FLOORS where the drafter tells its confidence,
    else 0 alone. rule: one whose settings have an n_max; p_min matters to FIXED, "accepted-mean"
    and "switch-off". Takes about 50 ms for 16 x 10 pairs over 1,000 tokens; does not block threads
    for longer than numpy does, and may run next to the window's.
    """
    if not rounds.n_drafts:
        return None
    costs = costs or RoundCosts.measured(rounds)
    longest = np.array(range(1, rounds.n_max + 1) if n_max is None else n_max, np.int64)
    if p_min is None:
        p_min = FLOORS if rounds.has_confidence else (0.0,)
    floors = np.array(p_min, float)
    settings: list[Setting] = [
        {"n_max": k, "p_min": p} for k in longest.tolist() for p in floors.tolist()
    ]
    played = simulate(rounds, costs, rule, settings)
    shape = (len(longest), len(floors))
    per_round = np.maximum(played.rounds.sum(1), 1)

    def ms(values: np.ndarray) -> np.ndarray:
        found: np.ndarray = (values.sum(1) / per_round).reshape(shape)
        return found

    speeds = played.tokens_per_second().reshape(shape)
    return Surface(
        rule.name,
        longest,
        floors,
        speeds,
        played.acceptance().reshape(shape),
        played.tokens_per_round().reshape(shape),
        ms(played.draft_ms),
        ms(played.verify_ms),
        ms(played.rest_ms),
        _speed_up(speeds, costs, longest, floors),
        costs.unmeasured(range(1, int(longest.max(initial=0)) + 2)) if costs else (),
    )


_PARTS, _LEAST_ROUNDS = 4, 32


def gain(rounds: RecordedRounds, best: Setting, now: Setting) -> tuple[float, float] | None:
    """The lowest and the highest speed of one setting over that of another, when the rounds cost
    what those of a quarter of the run did, the first to the last; None without times, or with too
    few rounds to say."""
    part, found = np.arange(len(rounds)) * _PARTS // max(len(rounds), 1), []
    for i in range(_PARTS if len(rounds) >= _LEAST_ROUNDS else 0):
        costs = RoundCosts.measured(rounds.where(part == i))
        if costs is None:
            return None
        speeds = simulate(rounds, costs, FIXED, [best, now]).tokens_per_second()
        found.append(float(speeds[0] / speeds[1]))
    return (min(found), max(found)) if found else None


def _speed_up(
    speeds: np.ndarray, costs: RoundCosts | None, n_max: np.ndarray, p_min: np.ndarray
) -> np.ndarray:
    """speeds [a, b] over plain decoding's, NaN where passes were not timed: of one token, and of
    n_max + 1; under a floor all in between."""
    if costs is None or not costs.plain_is_timed:
        return np.full(speeds.shape, np.nan)
    is_timed = np.isin(n_max + 1, costs.verify.at)
    all_are = np.array([not costs.unmeasured(range(2, n + 2)) for n in n_max.tolist()], bool)
    known = np.where(p_min > 0, all_are[:, None], is_timed[:, None])
    return np.where(known, speeds / costs.plain_speed, np.nan)
