"""What a round costs, from measured rounds only.

A round is drafting, by the number of steps the drafter does; a forward pass, by its width;
sampling, by width; saving a checkpoint, by width; undoing, by the tokens that stay, since a restore
decodes them again; and what no phase counts. `unmeasured` tells which widths were not measured.
What a run does for the first time is left out where the rest was measured, too (first_times).

Between two numbers that were measured, the time is on a straight line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from engine.analysis.what_if.recorded import RecordedRounds

LEAST_TIMES = 4
"""A number timed less often than that, in warm-up rounds perhaps, is not counted next to others
that were timed as often."""
_OUTLIER = 4.0
"""A time this many times the median of its kind is the machine's doing, and not counted,"""
_FEW = 8
"""where there are at least this many."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by a number. at: the numbers measured, ascending; ms, n: mean and count."""

    at: np.ndarray
    ms: np.ndarray
    n: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, ms: np.ndarray, *, all_count: bool = False) -> CostCurve:
        """From measured times, [n] each, without NaN, and unless all_count without outliers and
        numbers that were timed too seldom."""
        known = np.isfinite(ms)
        at, place = np.unique(numbers[known], return_inverse=True)
        values = ms[known]
        means, counts = np.zeros(len(at)), np.zeros(len(at), np.int64)
        for i in range(len(at)):
            mine = values[place == i]
            if not all_count and len(mine) >= _FEW and (middle := float(np.median(mine))) > 0:
                mine = mine[mine <= _OUTLIER * middle]
            means[i], counts[i] = mine.mean(), len(mine)
        enough = counts >= (0 if all_count else min(LEAST_TIMES, int(counts.max(initial=0))))
        return cls(at[enough], means[enough], counts[enough])

    @classmethod
    def of_points(cls, points: Mapping[int, float]) -> CostCurve:
        """From times known by number, such as those of `bench forward`."""
        at = np.array(sorted(points), np.int64)
        return cls(at, np.array([points[i] for i in at.tolist()]), np.ones(len(at), np.int64))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Milliseconds at each number; outside the measured ones that of the nearest, 0 if none."""
        if not len(self.at):
            return np.zeros(np.shape(numbers))
        found: np.ndarray = np.interp(numbers, self.at, self.ms)
        return found

    def trusted(self, least: int) -> CostCurve:
        """Without numbers that were measured less than this many times, but for the outermost."""
        kept = self.n >= least
        kept[:1] = kept[-1:] = True
        return CostCurve(self.at[kept], self.ms[kept], self.n[kept])

    def from_nothing(self) -> CostCurve:
        """The curve with 0 at 0, and as steep after the last number as from 0 to it."""
        if not len(self.at) or self.at[-1] <= 0:
            return CostCurve.of_points({0: 0.0})
        there = self.at > 0
        far = int(self.at[-1]) * 64
        return CostCurve(
            np.r_[0, self.at[there], far],
            np.r_[0.0, self.ms[there], self.ms[-1] * 64],
            np.r_[0, self.n[there], 0],
        )


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Curves by: draft, drafter's steps (0 at 0, and in proportion beyond those measured); verify,
    sample, save, width; undo, kept tokens. draft_0: looking for a draft that was not found; other:
    the rest of a round, ms. plain_ms: a round of plain decoding, ms, without a drafter.
    draft_by_step: like draft, where the drafter cannot do all its steps at once: under a p_min,
    after a prompt, and where the token limit keeps drafts short; None = the same. reading_ms: what
    a draft after a prompt takes beyond that, as the drafter reads the prompt first. plain_is_timed:
    whether plain_ms was measured, and not taken from wider passes."""

    draft: CostCurve
    verify: CostCurve
    sample: CostCurve
    save: CostCurve
    undo: CostCurve
    draft_0: float
    other: float
    plain_ms: float
    draft_by_step: CostCurve | None = None
    reading_ms: float = 0.0
    plain_is_timed: bool = False

    @classmethod
    def free(cls) -> RoundCosts:
        """Rounds that take no time."""
        none = CostCurve.of_points({})
        return cls(none, none, none, none, none, 0.0, 0.0, 0.0)

    @classmethod
    def measured(
        cls, rounds: RecordedRounds, plain: RecordedRounds | None = None
    ) -> RoundCosts | None:
        """From rounds that have times; None where they lack them.

        plain: rounds of plain decoding. Without them, a plain round is one without a draft, less
        the look for it; where none was recorded, the pass of one token that `verify` tells.
        """
        if not rounds.is_timed:
            return None
        phases = {name: np.nan_to_num(ms) for name, ms in rounds.phases.items()}
        has_draft, kept = rounds.verified > 0, rounds.accepted + 1
        undo = phases["rollback"] + phases["restore"] + phases["replay"]
        known = _rather(np.ones(len(rounds), bool), ~rounds.new_pass)
        verify = CostCurve.of(rounds.width[known], phases["verify"][known])
        sample = CostCurve.of(rounds.width, phases["sample"])
        draft = _draft_by_steps(rounds, phases["draft"])
        other = _mean(phases["other"])
        costs = cls(
            draft=draft,
            verify=verify,
            sample=sample,
            save=CostCurve.of(rounds.width[has_draft], phases["save"][has_draft]),
            # a restore among rollbacks is not an outlier
            undo=CostCurve.of(kept[rounds.is_undone], undo[rounds.is_undone], all_count=True),
            draft_0=_mean(phases["draft"][rounds.steps == 0]),
            other=other,
            plain_ms=0.0,
            reading_ms=_reading_ms(rounds, phases["draft"], draft),
        )
        one = np.ones(1, np.int64)
        plain_ms = float(verify(one)[0] + sample(one)[0]) + other
        is_timed = 1 in verify.at
        if plain is not None and plain.is_timed:
            total = sum(np.nan_to_num(ms) for ms in plain.phases.values())
            plain_ms, is_timed = _mean(np.asarray(total)), True
        return replace(costs, plain_ms=plain_ms, plain_is_timed=is_timed)

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding; NaN without a time."""
        return 1e3 / self.plain_ms if self.plain_ms else float("nan")

    def unmeasured(self, widths: Iterable[int]) -> tuple[int, ...]:
        """Of these widths, those that no pass had: their time is taken from the nearest."""
        return tuple(sorted(set(widths).difference(self.verify.at.tolist())))


def _draft_by_steps(rounds: RecordedRounds, ms: np.ndarray) -> CostCurve:
    """From the times of drafts, [n], after the first one of a text and not cut short."""
    drafts = rounds.steps > 0
    usual = _rather(drafts, (rounds.start > 0) & ~rounds.was_cut)
    known = _rather(usual, ~rounds.new_draft)
    return CostCurve.of(rounds.steps[known], ms[known]).from_nothing()


def _reading_ms(rounds: RecordedRounds, ms: np.ndarray, draft: CostCurve) -> float:
    """What first drafts of texts take beyond others. A median, as the first one compiles."""
    first = (rounds.steps > 0) & (rounds.start == 0)
    more = (ms - draft(rounds.steps))[_rather(first, ~rounds.new_draft)]
    return max(float(np.median(more)), 0.0) if len(more) else 0.0


def _rather(rounds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of rounds, bool [n], the wanted ones; all where none is such."""
    found = rounds & wanted
    return found if found.any() else rounds


def _mean(ms: np.ndarray) -> float:
    if not len(ms):
        return 0.0
    curve = CostCurve.of(np.zeros(len(ms), np.int64), ms)
    return float(curve.ms[0])
