"""Simulation of recorded rounds under other settings: speed, acceptance and time by part, for each
draft length, and for length and p_min.

A walker goes through each text from its start. At each place a rule chooses a draft from what was
recorded there; the text says how much of it is right; the measured costs give the time of the
round; the next round begins after the accepted tokens. `ASSUMPTIONS` lists what this ignores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.analysis.what_if.positions import Positions, confidence_scale, survival_of
from engine.analysis.what_if.recorded import RecordedRounds, RoundCosts
from engine.analysis.what_if.rules import FIXED, FLOORS, NO_DRAFTER, RuleInputs, Setting
from engine.draft.adaptive import AdaptRule

ASSUMPTIONS = (
    "within accepted tokens, the drafter would have drafted the same as recorded",
    "where a longer draft than recorded is needed, it has the acceptance of recorded drafts",
    "drafts, passes and rollbacks have the mean measured cost for their length",
    "unmeasured costs are interpolated, drafting costs are proportional to the steps",
)
_PIECE = 512
"""Longer texts are simulated in pieces that begin at recorded rounds."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Settings played in texts: [m settings, n texts] each, except `settings`.

    tokens: emitted after the first. rounds; drafted: tokens verified; accepted; *_ms: total
    milliseconds. rest: sampling, saving, undoing, and what no phase counts.
    """

    settings: tuple[Setting, ...]
    tokens: np.ndarray
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    draft_ms: np.ndarray
    verify_ms: np.ndarray
    rest_ms: np.ndarray

    @property
    def total_ms(self) -> np.ndarray:
        """Time of each setting in each text."""
        return self.draft_ms + self.verify_ms + self.rest_ms

    def tokens_per_second(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Per setting over all texts, or some (indices); float [m], NaN without times."""
        return 1e3 * _sum(self.tokens, texts) / _nonzero(_sum(self.total_ms, texts))

    def acceptance(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Accepted / verified drafted tokens: [m], NaN without drafts."""
        return _sum(self.accepted, texts) / _nonzero(_sum(self.drafted, texts))

    def tokens_per_round(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Tokens over rounds: [m]."""
        return _sum(self.tokens, texts) / _nonzero(_sum(self.rounds, texts))


def simulate(
    rounds: RecordedRounds, costs: RoundCosts | None, rule: AdaptRule, settings: Sequence[Setting]
) -> Outcomes:
    """Play the recorded texts under settings of a rule.

    costs: None leaves all times 0 and speeds NaN. The longest draft among the settings should not
    exceed rounds.n_max: longer ones are accepted by chance.
    """
    m = len(settings)
    n_max = int(max((setting.get("n_max", 0) for setting in settings), default=0))
    places = Positions.of(rounds, n_max)
    begins, ends, text = _pieces(places, in_pieces=rule is FIXED)
    of = np.repeat(np.arange(m), len(begins))
    timed = costs or RoundCosts.free()
    inputs = RuleInputs(places, timed, survival_of(rounds), confidence_scale(rounds), of)
    has_floor = np.array([setting.get("p_min", 0) > 0 for setting in settings], bool)[of]
    chooser = rule.make(inputs, settings)
    table = _Prices(timed, max(n_max, places.confidence.shape[1]) + 1)
    at, end, text_of = np.tile(begins, m), np.tile(ends, m), np.tile(text, m)
    length = end - at
    sums = {name: np.zeros(len(of)) for name in _SUMS}
    walkers = np.flatnonzero(at < end)
    while len(walkers):
        here = at[walkers]
        verified, steps = chooser.choose(walkers, here)
        if places.is_independent:
            left = length[walkers] - sums["tokens"][walkers].astype(np.int64)
            room = np.where(places.ends_at_limit[text_of[walkers]], left - 1, _PIECE)
            verified, steps = np.minimum(verified, room), np.minimum(steps, room)
        else:
            left, room = end[walkers] - here, places.limit[here]
        accepted = np.minimum(places.right[here], verified)
        tokens = np.minimum(accepted + 1, left)
        chooser.learn(walkers, verified, accepted)
        begins = here == places.begins[text_of[walkers]]
        by_step = has_floor[walkers] | begins | (steps >= room)
        draft, verify, rest = table.of(verified, steps, accepted, by_step)
        draft = draft + timed.reading_ms * (begins & (steps > 0))
        sums["tokens"][walkers] += tokens
        sums["rounds"][walkers] += 1
        sums["drafted"][walkers] += verified
        sums["accepted"][walkers] += accepted
        sums["draft_ms"][walkers] += draft
        sums["verify_ms"][walkers] += verify
        sums["rest_ms"][walkers] += rest
        at[walkers] = here + (1 if places.is_independent else tokens)
        walkers = walkers[tokens < left]
    n_texts = len(places.begins)
    cell = of * n_texts + text_of
    totals = {
        name: np.bincount(cell, values, m * n_texts).reshape(m, n_texts)
        for name, values in sums.items()
    }
    return Outcomes(tuple(settings), **totals)


_SUMS = ("tokens", "rounds", "drafted", "accepted", "draft_ms", "verify_ms", "rest_ms")


class _Prices:
    """Round times, ms, from tables by small numbers."""

    def __init__(self, costs: RoundCosts, most: int) -> None:
        number = np.arange(most + 2)
        by_step = costs.draft_by_step or costs.draft
        # all steps at once, and one by one; the last number is NO_DRAFTER
        self._draft = np.array([[*costs.draft(number), 0.0], [*by_step(number), 0.0]])
        self._draft[:, 0] = costs.draft_0
        self._verify = costs.verify(number)
        self._rest = costs.sample(number) + costs.other
        self._save, self._undo = costs.save(number), costs.undo(number)
        self._plain_rest = max(costs.plain_ms - float(self._verify[1]), 0.0)
        self._plain_verify = costs.plain_ms - self._plain_rest

    def of(
        self, verified: np.ndarray, steps: np.ndarray, accepted: np.ndarray, by_step: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Time of drafting, verifying and the rest of rounds, [n] each."""
        width, plain = verified + 1, steps == NO_DRAFTER
        rest = self._rest[width] + self._save[width] * (verified > 0)
        rest = rest + self._undo[accepted + 1] * (accepted < verified)
        return (
            self._draft[by_step.astype(np.int64), steps],
            np.where(plain, self._plain_verify, self._verify[width]),
            np.where(plain, self._plain_rest, rest),
        )


def _pieces(places: Positions, *, in_pieces: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and text of the parts simulated separately: whole texts, unless they are long and
    the rule has no memory."""
    begins, ends, texts = [], [], []
    for text, (begin, end) in enumerate(
        zip(places.begins.tolist(), places.ends.tolist(), strict=True)
    ):
        cuts = [begin]
        if in_pieces and end - begin > 2 * _PIECE:
            for wanted in range(begin + _PIECE, end - _PIECE, _PIECE):
                found = np.flatnonzero(places.is_begin[wanted : wanted + _PIECE])
                if len(found):
                    cuts.append(wanted + int(found[0]))
        cuts = sorted(set(cuts))
        begins += cuts
        ends += [*cuts[1:], end]
        texts += [text] * len(cuts)
    return np.array(begins, np.int64), np.array(ends, np.int64), np.array(texts, np.int64)


def _sum(values: np.ndarray, texts: np.ndarray | None) -> np.ndarray:
    found: np.ndarray = (values if texts is None else values[:, texts]).sum(1)
    return found


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, np.nan)


@dataclass(frozen=True, slots=True)
class DraftLengthEstimate:
    """One n_max. expected_length: tokens per round. Times: milliseconds per round.

    rest_ms: sampling, checkpoint, rollback, restore, replay, and what no phase counts. Times and
    tokens_per_second are None if the run was not timed, the speed of plain decoding also if no
    single-token pass was.
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
"""Smaller gains count as none."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimates for n_max 0 … K in order, K being the longest recorded draft.

    n_steps: rounds with a draft. unmeasured_widths: verify widths that an estimate needs and no row
    had; their cost is interpolated. gain: of the best over the recorded setting, see `gain`.
    """

    n_steps: int
    estimates: tuple[DraftLengthEstimate, ...]
    unmeasured_widths: tuple[int, ...]
    gain: tuple[float, float] | None = None

    @property
    def recorded(self) -> DraftLengthEstimate:
        """The run's own n_max."""
        return self.estimates[-1]

    @property
    def best(self) -> DraftLengthEstimate | None:
        """The fastest; ties go to the smaller n_max. None without times."""
        timed = [e for e in self.estimates if e.tokens_per_second is not None]
        return max(timed, key=lambda e: (e.tokens_per_second or 0.0, -e.n_max), default=None)

    @property
    def is_shown(self) -> bool:
        """Whether the best is the recorded one, or faster beyond the run's own spread."""
        best = self.best
        is_same = best is not None and best.n_max == self.recorded.n_max
        return is_same or (self.gain is not None and self.gain[0] >= LEAST_GAIN)


def what_if(rounds: RecordedRounds, *, is_whole: bool = True) -> WhatIf | None:
    """Estimates from the rounds of one run; None without drafts. is_whole: the run has ended, so a
    gain is worth computing."""
    costs = RoundCosts.measured(rounds)
    played = surface(rounds, costs, n_max=range(rounds.n_max + 1), p_min=(0.0,))
    if played is None:
        return None
    times = played.draft_ms, played.verify_ms, played.rest_ms, played.tokens_per_second
    estimates = []
    for i, (expected,) in enumerate(played.tokens_per_round.tolist()):
        ms: list[float | None] = [float(values[i, 0]) for values in times] if costs else [None] * 4
        if not i and costs and not costs.plain_is_timed:
            ms[-1] = None
        estimates.append(DraftLengthEstimate(i, expected, *ms))
    missing = played.unmeasured_widths
    result = WhatIf(rounds.n_drafts, tuple(estimates), missing)
    timed = result.best is not None and result.best.n_max + 1 not in missing
    if not (is_whole and timed) or result.best == result.recorded:
        return result
    best, now = ({"n_max": one.n_max} for one in (result.best, result.recorded) if one)
    return replace(result, gain=gain(rounds, best, now))


@dataclass(frozen=True, slots=True)
class Surface:
    """A rule's outcome for every pair of n_max [a] and p_min [b]: arrays are float [a, b].

    tokens_per_second: NaN if the run was not timed. acceptance: NaN without drafts. draft_ms,
    verify_ms, rest_ms: per round. speed_up: against plain decoding; NaN if single-token passes, or
    those that a setting needs, were not timed in this run. unmeasured_widths: verify widths that
    are needed and no recorded pass had.
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
        """Row and column of the fastest; ties go to the shortest draft and the lowest floor. None
        without times."""
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
    rule: AdaptRule = FIXED,
) -> Surface | None:
    """Play a run under every pair; None without drafts.

    `surface(RecordedRounds.of(run))` is all that a view needs. costs: None = those of the run
    itself. n_max: 1 … the longest recorded. p_min: FLOORS if the drafter reports confidence, else
    only 0. rule: one whose settings have an n_max; p_min matters to FIXED, "accepted-mean" and
    "switch-off". Takes about 50 ms for 16 x 10 pairs over 1,000 tokens; holds the GIL no longer
    than numpy does, and may run next to the window's thread.
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
    """The lowest and highest speed ratio of two settings over the quarters of the run's rounds;
    None with too few rounds, or if a quarter lacks times or the widest passes that the first
    setting needs."""
    part, found = np.arange(len(rounds)) * _PARTS // max(len(rounds), 1), []
    for i in range(_PARTS if len(rounds) >= _LEAST_ROUNDS else 0):
        costs = RoundCosts.measured(rounds.where(part == i))
        if costs is None or costs.unmeasured([int(best["n_max"]) + 1]):
            return None
        speeds = simulate(rounds, costs, FIXED, [best, now]).tokens_per_second()
        found.append(float(speeds[0] / speeds[1]))
    return (min(found), max(found)) if found else None


def _speed_up(
    speeds: np.ndarray, costs: RoundCosts | None, n_max: np.ndarray, p_min: np.ndarray
) -> np.ndarray:
    """speeds [a, b] relative to plain decoding, NaN if passes of one token or of n_max + 1 (with a
    floor all in between) were not timed."""
    if costs is None or not costs.plain_is_timed:
        return np.full(speeds.shape, np.nan)
    is_timed = np.isin(n_max + 1, costs.verify.at)
    all_are = np.array([not costs.unmeasured(range(2, n + 2)) for n in n_max.tolist()], bool)
    known = np.where(p_min > 0, all_are[:, None], is_timed[:, None])
    return np.where(known, speeds / costs.plain_speed, np.nan)
