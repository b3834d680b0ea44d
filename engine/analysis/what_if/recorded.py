"""Recorded rounds as arrays: where each began, its draft, confidence and outcome; and measured
costs.

If only a part of a draft was verified (--spec-verify-max), the trace holds its other tokens too.
Their fate is *derived* from the text that followed: with acceptance by matching, the text does not
depend on the drafts, and the target would have chosen the same. Under rejection sampling and
synthetic acceptance it stays unknown.

Costs come from measured rounds only. A round is drafting, by the number of drafter steps; a forward
pass, by width; sampling, by width; saving a checkpoint, by width; undoing, by kept tokens, since a
restore decodes them again; and the rest that no phase counts. `unmeasured` lists widths that were
not measured. First-time costs of a run are left out if the rest was measured too (first_times).

Between measured numbers, times are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from engine.analysis.acceptance.breakdown import DraftedTokens, rows_of
from engine.trace.records import MISSING, PHASES
from engine.trace.run_ref import RunColumns, RunRef


@dataclass(frozen=True, slots=True)
class RecordedRounds:
    """Rounds after the prompts, [n] each, ordered by sequence and time.

    seq: number of the text, from 0. start: tokens of the text before the round, without the free
    first one. emitted: tokens added by the round. drafted: drafted tokens, verified or not.
    verified: those in the verify batch. accepted: leading tokens known to be right. is_final:
    whether the next one is known to be wrong; else the outcome of a longer draft is unknown.
    was_full: the draft ended only because no more tokens were requested. was_cut: the token limit
    or the context kept it short. steps: drafter steps, including a token below p_min. width: of the
    verify batch. new_pass, new_draft: whether the pass of that width, or the draft after this many
    accepted tokens, was among the run's first (first_times). is_undone: whether a rollback, restore
    or replay was needed. confidence: float [n, k], NaN if not observed. phases: milliseconds by
    phase, NaN if not observed, as in lanes, whose drafts are shared; "other" is the rest of the
    round. ends_at_limit: bool by text: the token limit ended it, and kept drafts short before.
    is_independent: acceptance was drawn by chance, so what comes next does not depend on where a
    round begins. chance: then the accepted tokens of a full draft in each round of any text, int64
    [rounds]; None beyond the recorded rounds.
    """

    seq: np.ndarray
    start: np.ndarray
    emitted: np.ndarray
    drafted: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    is_final: np.ndarray
    was_full: np.ndarray
    was_cut: np.ndarray
    steps: np.ndarray
    width: np.ndarray
    new_pass: np.ndarray
    new_draft: np.ndarray
    is_undone: np.ndarray
    confidence: np.ndarray
    phases: dict[str, np.ndarray]
    ends_at_limit: np.ndarray
    is_independent: bool
    chance: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def n_max(self) -> int:
        """The longest draft that was recorded."""
        return int(self.drafted.max(initial=0))

    @property
    def n_drafts(self) -> int:
        """Rounds with a draft."""
        return int((self.drafted > 0).sum())

    @property
    def has_confidence(self) -> bool:
        """Whether a confidence floor has an effect."""
        return bool(np.isfinite(self.confidence).any())

    @property
    def is_timed(self) -> bool:
        """Whether every round has the time of its forward pass."""
        return bool(len(self)) and bool(np.isfinite(self.phases["verify"]).all())

    @classmethod
    def of(cls, run: RunRef, newest: int | None = None) -> RecordedRounds:
        """The rounds of a run of any engine; unknown values are NaN, or the usual ones.

        newest: at most this many rounds, the last ones.
        """
        rows = RunColumns(run.store, "rounds", run.run_id)
        every = np.flatnonzero(~rows.is_prompt & (rows["n_merged"] == MISSING))
        order = every if newest is None else every[-newest:]
        is_whole = len(order) == len(every)
        order = order[np.argsort(rows["seq_id"][order], kind="stable")]
        return _from_rows(run, rows, order, is_whole=is_whole)

    def repeated(self) -> RecordedRounds:
        """The same with no pass or draft marked as new, as in a session that had done them all."""
        none = np.zeros(len(self), bool)
        return replace(self, new_pass=none, new_draft=none)

    def where(self, chosen: np.ndarray) -> RecordedRounds:
        """Selected rounds, bool [n], for their times only: the texts then have gaps."""
        kept: dict[str, Any] = {
            field.name: getattr(self, field.name)[chosen]
            for field in fields(self)
            if field.name not in ("phases", "ends_at_limit", "is_independent", "chance")
        }
        phases = {name: ms[chosen] for name, ms in self.phases.items()}
        return replace(self, **kept, phases=phases)

    @classmethod
    def joined(cls, parts: list[RecordedRounds]) -> RecordedRounds:
        """The rounds of several runs with texts renumbered. Raises ValueError without any."""
        if not parts:
            raise ValueError("no rounds to merge")
        k = max(part.confidence.shape[1] for part in parts)
        shift = np.cumsum([0, *(len(part.ends_at_limit) for part in parts)])
        columns: dict[str, Any] = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if field.name not in ("seq", "confidence", "phases", "is_independent", "chance")
        }
        columns["seq"] = np.concatenate([p.seq + at for p, at in zip(parts, shift, strict=False)])
        columns["confidence"] = np.concatenate([_padded(part.confidence, k) for part in parts])
        columns["phases"] = {
            name: np.concatenate([part.phases[name] for part in parts]) for name in parts[0].phases
        }
        return cls(**columns, is_independent=any(part.is_independent for part in parts))


def _from_rows(
    run: RunRef, rows: RunColumns, order: np.ndarray, *, is_whole: bool
) -> RecordedRounds:
    def pick(name: str) -> np.ndarray:
        return rows[name][order]

    seq_ids, seq = np.unique(pick("seq_id"), return_inverse=True)
    first = np.r_[True, seq[1:] != seq[:-1]] if len(seq) else np.zeros(0, bool)
    emitted = np.maximum(pick("num_emitted"), 0)
    before = np.cumsum(emitted) - emitted
    starts_of_text = before[first]
    start = before - starts_of_text[seq] if len(seq) else before
    verified = np.maximum(pick("num_draft_tokens"), 0)
    accepted = np.clip(pick("num_accepted_draft_tokens"), 0, verified)
    drafts = DraftedTokens(run, rows, order, verified)
    options, independent = run.facts.options, bool(run.facts.synthetic)
    matched = not independent and (options is None or options.spec.accept == "match")
    low, cut = (_ended_by(run, rows, order, reason) for reason in ("p_min", "limit"))
    asked_for = drafts.length.max(initial=0)
    steps = drafts.length + (low & (drafts.length < asked_for))
    n_read = np.where(start == 0, 0, np.r_[0, accepted[:-1] + 1])
    is_final = accepted < verified
    if matched and (drafts.length > verified).any():
        derived, wrong = drafts.fate(rows, order)
        more = (accepted == verified) & (drafts.length > verified) & (derived >= verified)
        accepted = np.where(more, derived, accepted)
        is_final = np.where(more, wrong, is_final)
    width = np.maximum(pick("verify_width"), 0)
    phases = {phase: pick(f"{phase}_ms") for phase in PHASES}
    if run.facts.lane:
        phases = {phase: np.full(len(order), np.nan) for phase in PHASES}
    phases["other"] = _other_ms(rows, order)
    stops = run.facts.stops or []
    at_limit = [int(i) < len(stops) and stops[int(i)] == "limit" for i in seq_ids]
    undone = pick("rollback_depth") > 0
    return RecordedRounds(
        seq=seq,
        start=start,
        emitted=emitted,
        drafted=drafts.length,
        verified=verified,
        accepted=accepted,
        is_final=is_final,
        was_full=(drafts.length == asked_for) & (asked_for > 0),
        was_cut=cut,
        steps=steps,
        width=width,
        new_pass=_new(width, order, np.full(len(order), is_whole)),
        new_draft=_new(n_read, order, (steps > 0) & is_whole),
        is_undone=undone,
        confidence=drafts.confidence,
        phases=phases,
        ends_at_limit=np.array(at_limit, bool),
        is_independent=independent,
    )


def _new(keys: np.ndarray, order: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Counted rows whose key is among the first of its kind in the run. order: rows of the table in
    order of time. If the beginning is left out, no row counts."""
    found = np.zeros(len(keys), bool)
    by_time = np.argsort(order)
    by_time = by_time[counted[by_time]]
    found[by_time] = are_first(keys[by_time])
    return found


def _padded(confidence: np.ndarray, k: int) -> np.ndarray:
    more = k - confidence.shape[1]
    return np.pad(confidence, ((0, 0), (0, more)), constant_values=np.nan)


def _ended_by(run: RunRef, rounds: RunColumns, order: np.ndarray, reason: str) -> np.ndarray:
    """Drafts that the last drafter ended for this reason, such as a token below p_min: bool [n]."""
    asked = RunColumns(run.store, "drafts", run.run_id)
    row = rows_of(rounds, order, asked["round"], asked["seq_id"])
    is_so = asked.is_text("reason", reason)
    found = np.zeros(len(order), bool)
    found[row[row >= 0]] = is_so[row >= 0]  # the last of several wins
    return found


def _other_ms(rounds: RunColumns, order: np.ndarray) -> np.ndarray:
    """Each row's share of the round time that no phase counts, ms; 0 if unknown."""
    numbers, row = np.unique(rounds["round"], return_inverse=True)
    end = np.zeros(len(numbers))
    np.maximum.at(end, row, np.nan_to_num(rounds["t_ms"]))
    phases = np.zeros(len(numbers))
    for phase in PHASES:
        np.add.at(phases, row, np.nan_to_num(rounds[f"{phase}_ms"]))
    rest = np.maximum(np.diff(end, prepend=0.0) - phases, 0.0)
    share = np.bincount(row, minlength=len(numbers))
    other: np.ndarray = (rest / np.maximum(share, 1))[row][order]
    return other


SEEN = 2
"""Number of first passes of a shape that cost more than later ones."""


def are_first(keys: np.ndarray) -> np.ndarray:
    """Keys, int64 [n], that are among the first SEEN equal ones: bool [n]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]][: len(keys)]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    found = np.empty(len(keys), bool)
    found[order] = np.arange(len(keys)) - first < SEEN
    return found


LEAST_TIMES = 4
"""Numbers timed less often, as in warm-up rounds, are ignored if others were timed this often."""
_OUTLIER = 4.0
"""Times above this multiple of the median of their kind are outliers and are ignored,"""
_FEW = 8
"""provided that there are at least this many."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by a number. at: the numbers measured, ascending; ms, n: mean and count."""

    at: np.ndarray
    ms: np.ndarray
    n: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, ms: np.ndarray, *, all_count: bool = False) -> CostCurve:
        """From measured times, [n] each, without NaN; unless all_count, outliers and rarely timed
        numbers are ignored."""
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
        """From known times by number, such as those of `bench forward`."""
        at = np.array(sorted(points), np.int64)
        return cls(at, np.array([points[i] for i in at.tolist()]), np.ones(len(at), np.int64))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Milliseconds at each number; outside the measured range that of the nearest, 0 if
        none."""
        if not len(self.at):
            return np.zeros(np.shape(numbers))
        found: np.ndarray = np.interp(numbers, self.at, self.ms)
        return found

    def trusted(self, least: int) -> CostCurve:
        """Without numbers measured fewer times than this, except the outermost."""
        kept = self.n >= least
        kept[:1] = kept[-1:] = True
        return CostCurve(self.at[kept], self.ms[kept], self.n[kept])

    def from_nothing(self) -> CostCurve:
        """The curve through 0 at 0, and beyond the last number as steep as from 0 to it."""
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
    """Curves by: draft, drafter's steps (0 at 0, proportional beyond those measured); verify,
    sample, save, width; undo, kept tokens. draft_0: an unsuccessful search for a draft; other: the
    rest of a round, ms. plain_ms: a round of plain decoding without a drafter, ms. draft_by_step:
    like draft, where the drafter cannot do all steps at once: with p_min, after a prompt, and where
    the token limit keeps drafts short; None = the same. reading_ms: extra time of a draft after a
    prompt, which the drafter reads first. plain_is_timed: whether plain_ms was measured, not
    derived from wider passes."""

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
        """Rounds without cost."""
        none = CostCurve.of_points({})
        return cls(none, none, none, none, none, 0.0, 0.0, 0.0)

    @classmethod
    def measured(
        cls, rounds: RecordedRounds, plain: RecordedRounds | None = None
    ) -> RoundCosts | None:
        """From timed rounds; None without times.

        plain: rounds of plain decoding. Without them, a plain round is one without a draft, minus
        the search for it; if none was recorded, the pass of one token from `verify`.
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
        """Those of the widths that no pass had: their time is that of the nearest."""
        return tuple(sorted(set(widths).difference(self.verify.at.tolist())))


def _draft_by_steps(rounds: RecordedRounds, ms: np.ndarray) -> CostCurve:
    """From the times of drafts, [n], after a text's first one and not cut short."""
    drafts = rounds.steps > 0
    usual = _rather(drafts, (rounds.start > 0) & ~rounds.was_cut)
    known = _rather(usual, ~rounds.new_draft)
    return CostCurve.of(rounds.steps[known], ms[known]).from_nothing()


def _reading_ms(rounds: RecordedRounds, ms: np.ndarray, draft: CostCurve) -> float:
    """Extra time of the first drafts of texts. A median, because the first one compiles."""
    first = (rounds.steps > 0) & (rounds.start == 0)
    more = (ms - draft(rounds.steps))[_rather(first, ~rounds.new_draft)]
    return max(float(np.median(more)), 0.0) if len(more) else 0.0


def _rather(rounds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The wanted rounds, bool [n]; all rounds if there are none."""
    found = rounds & wanted
    return found if found.any() else rounds


def _mean(ms: np.ndarray) -> float:
    if not len(ms):
        return 0.0
    curve = CostCurve.of(np.zeros(len(ms), np.int64), ms)
    return float(curve.ms[0])
