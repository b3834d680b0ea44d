"""What a round costs, from measured rounds only.

A round is drafting, by the number of steps the drafter does; a forward pass, by its width;
sampling, by width; saving a checkpoint, by width; undoing, by the tokens that stay, since a restore
decodes them again; and what no phase counts. `unmeasured` tells which widths were not measured.
What the first rounds of a kind in a run take beyond that stands by itself (first_times).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from engine.trace.what_if.cost_curve import CostCurve
from engine.trace.what_if.first_times import BEHIND_PART, N_KINDS, SEEN, FirstTimes, typical
from engine.trace.what_if.recorded import RecordedRounds


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Curves by: draft, drafter's steps (0 at 0, and in proportion beyond those measured); verify,
    sample, save, width; undo, kept tokens. draft_0: looking for a draft that was not found; other:
    the rest of a round, ms. plain_ms: a round of plain decoding, ms, without a drafter.
    draft_by_floor: like draft, under a p_min, which every step waits for; None = the same.
    reading_ms: [N_KINDS], what a draft takes beyond that by what the drafter reads before it
    (first_times). first: what a run takes beyond all that where it does something for the first
    time."""

    draft: CostCurve
    verify: CostCurve
    sample: CostCurve
    save: CostCurve
    undo: CostCurve
    draft_0: float
    other: float
    plain_ms: float
    draft_by_floor: CostCurve | None = None
    reading_ms: np.ndarray = field(default_factory=lambda: np.zeros(N_KINDS))
    first: FirstTimes = field(default_factory=FirstTimes.none)

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
        has_draft, drafting = rounds.verified > 0, _drafting(rounds, phases["draft"])
        kept = rounds.accepted + 1
        undo = phases["rollback"] + phases["restore"] + phases["replay"]
        known = _known(np.ones(len(rounds), bool), rounds.nth_pass)
        verify = CostCurve.of(rounds.width[known], phases["verify"][known])
        sample = CostCurve.of(rounds.width, phases["sample"])
        first = FirstTimes(
            typical(phases["verify"] - verify(rounds.width), rounds.nth_pass), drafting.first
        )
        other = _mean(phases["other"])
        costs = cls(
            draft=drafting.by_steps,
            verify=verify,
            sample=sample,
            save=CostCurve.of(rounds.width[has_draft], phases["save"][has_draft]),
            # a restore among rollbacks is no outlier
            undo=CostCurve.of(kept[rounds.is_undone], undo[rounds.is_undone], all_count=True),
            draft_0=_mean(phases["draft"][rounds.steps == 0]),
            other=other,
            plain_ms=0.0,
            reading_ms=drafting.reading_ms,
            first=first,
        )
        one = np.ones(1, np.int64)
        plain_ms = float(verify(one)[0] + sample(one)[0]) + other
        if plain is not None and plain.is_timed:
            total = sum(np.nan_to_num(ms) for ms in plain.phases.values())
            plain_ms = _mean(np.asarray(total))
        return costs.with_plain(plain_ms)

    def plain_speed(self, n_tokens: int) -> float:
        """Tokens per second of a run of so many by plain decoding; NaN without a time."""
        ms = n_tokens * self.plain_ms
        return 1e3 * n_tokens / (ms + float(self.first.passes.sum())) if ms else float("nan")

    def with_plain(self, plain_ms: float) -> RoundCosts:
        """The same with another time of a plain round."""
        return replace(self, plain_ms=plain_ms)

    def with_verify(self, points: Mapping[int, float]) -> RoundCosts:
        """The same with forward passes timed by themselves: milliseconds by width, as
        `bench --steps … --outputs all` gives them."""
        return replace(self, verify=CostCurve.of_points(points))

    def unmeasured(self, widths: Iterable[int]) -> tuple[int, ...]:
        """Of these widths, those that no pass had: their time is taken from the nearest."""
        return tuple(sorted(set(widths).difference(self.verify.at.tolist())))


class _Drafting(NamedTuple):
    """What drafting takes: the fields of RoundCosts, and of its `first`."""

    by_steps: CostCurve
    reading_ms: np.ndarray
    first: np.ndarray


def _drafting(rounds: RecordedRounds, ms: np.ndarray) -> _Drafting:
    """From the times of rounds, [n]. Drafts behind one accepted in part tell the steps."""
    drafts = rounds.steps > 0
    settled = _known(drafts, rounds.nth_read)
    tried = settled & (rounds.reads == BEHIND_PART)
    if not tried.any():
        tried = settled
    by_steps = CostCurve.of(rounds.steps[tried], ms[tried]).from_nothing()
    more = ms - by_steps(rounds.steps)
    kinds = [drafts & (rounds.reads == kind) for kind in range(N_KINDS)]
    reading_ms = np.array([_beyond(more[_known(kind, rounds.nth_read)]) for kind in kinds])
    more = more - reading_ms[rounds.reads]
    first = np.array([typical(more[kind], rounds.nth_read[kind]) for kind in kinds])
    return _Drafting(by_steps, reading_ms, first)


def _known(rounds: np.ndarray, nth: np.ndarray) -> np.ndarray:
    """Of rounds, bool [n], those that did nothing for the first time; all where none is such."""
    settled = rounds & (nth >= SEEN)
    return settled if settled.any() else rounds


def _beyond(ms: np.ndarray) -> float:
    return max(float(np.median(ms)), 0.0) if len(ms) else 0.0


def _mean(ms: np.ndarray) -> float:
    if not len(ms):
        return 0.0
    curve = CostCurve.of(np.zeros(len(ms), np.int64), ms)
    return float(curve.ms[0])
