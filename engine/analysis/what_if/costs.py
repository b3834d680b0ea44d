"""What a round costs, from measured rounds only.

A round is drafting, by the number of steps the drafter does; a forward pass, by its width;
sampling, by width; saving a checkpoint, by width; undoing, by the tokens that stay, since a restore
decodes them again; and what no phase counts. `unmeasured` tells which widths were not measured.
What a run does for the first time is left out where the rest was measured, too (first_times).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from engine.analysis.what_if.cost_curve import CostCurve
from engine.analysis.what_if.recorded import RecordedRounds


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
